"use strict";
// Details of a token on hover and on keyboard focus. The page is whole without this script.
(function () {
  const source = document.getElementById("data");
  const detail = document.getElementById("detail");
  if (!source || !detail) return;
  const data = JSON.parse(source.textContent);
  const number = (value, digits) => value === null ? "not recorded" : Number(value).toPrecision(digits);
  const ms = (micros) => (micros / 1000).toFixed(micros < 10000 ? 2 : 1) + " ms";

  function rowsOf(part, row) {
    const [kind, id, position, depth, gap, draftGap, ratio, at, choice, runner, draftRunner] = row;
    const [cycle, all, draft, verify, commit, committed, drafted, reason, draftEnd] = part.cycles[at];
    const text = (one) => JSON.stringify(part.pieces[one] ?? "") + " (" + one + ")";
    const rows = [["position", position], ["token id", id]];
    if (depth) rows.push(["draft depth", depth + " of " + Math.max(depth, drafted)]);
    if (depth) rows.push(["drafter's gap", number(draftGap, 4)]);
    rows.push(["target's gap", number(gap, 4)]);
    if (depth) rows.push([data.sampled ? "p / drafter's p" : "ratio", ratio === null ? "not compared" : number(ratio, 4)]);
    if (choice !== null) rows.push(["target's choice", text(choice)]);
    if (runner !== null && runner !== id) rows.push(["target's second", text(runner)]);
    if (draftRunner !== null) rows.push(["drafter's second", text(draftRunner)]);
    if (committed) rows.push(["time", ms(all / committed) + " a token"]);
    rows.push(["cycle " + cycle, ms(all) + ", " + drafted + " drafted, " + committed + " committed"]);
    rows.push(["", "draft " + ms(draft) + ", verify " + ms(verify) + ", commit " + ms(commit)]);
    rows.push(["its end", reason + "; drafting: " + draftEnd]);
    return [data.kinds[kind], rows];
  }

  function add(parent, tag, text, name) {
    const element = document.createElement(tag);
    element.textContent = text;
    if (name) element.className = name;
    parent.append(element);
    return element;
  }

  function fill(span, part, row) {
    const [[kind, meaning], rows] = rowsOf(part, row);
    detail.replaceChildren();
    add(detail, "div", kind + ": " + JSON.stringify(span.textContent), "head");
    const list = add(detail, "dl", "");
    for (const [name, value] of rows) {
      add(list, "dt", name);
      add(list, "dd", value);
    }
    add(detail, "p", meaning, "why");
  }

  function place(span) {
    const box = span.getClientRects()[0] || span.getBoundingClientRect();
    const width = detail.offsetWidth, height = detail.offsetHeight;
    const left = Math.min(Math.max(8, box.left), document.documentElement.clientWidth - width - 8);
    const below = box.bottom + 8 + height <= window.innerHeight;
    detail.style.left = Math.max(8, left) + "px";
    detail.style.top = (below ? box.bottom + 8 : Math.max(8, box.top - height - 8)) + "px";
  }

  let shown = null;
  function hide() {
    detail.hidden = true;
    if (shown) {
      shown.classList.remove("on");
      shown.removeAttribute("aria-describedby");
    }
    shown = null;
  }

  document.querySelectorAll(".tokens").forEach(function (block) {
    const spans = Array.from(block.querySelectorAll(".t"));
    const index = new Map(spans.map((span, i) => [span, i]));
    const part = data.parts[Number(block.dataset.part)];
    const visible = (span) => span.getClientRects().length > 0;
    function show(span) {
      hide();
      fill(span, part, part.tokens[index.get(span)]);
      detail.hidden = false;
      span.setAttribute("aria-describedby", "detail");
      span.classList.add("on");
      shown = span;
      place(span);
    }
    // One stop of the tab key a text; arrow keys walk from token to token.
    let stop = spans.find((span) => !span.matches(".rejected, .unused, .beyond, .probe"));
    if (stop) stop.tabIndex = 0;
    function stopAt(span) {
      if (stop) stop.tabIndex = -1;
      stop = span;
      span.tabIndex = 0;
      span.focus();
    }
    function walk(from, step) {
      let i = from + step;
      while (i >= 0 && i < spans.length && !visible(spans[i])) i += step;
      if (i >= 0 && i < spans.length) stopAt(spans[i]);
    }
    block.addEventListener("pointerover", function (event) {
      const span = event.target.closest(".t");
      if (span) show(span);
    });
    block.addEventListener("pointerleave", function () {
      const active = document.activeElement;
      if (index.has(active) && active.matches(":focus-visible")) show(active); else hide();
    });
    block.addEventListener("click", function (event) {
      const span = event.target.closest(".t");
      if (!span) return;
      stopAt(span);
      show(span);
    });
    block.addEventListener("focusin", (event) => { if (index.has(event.target)) show(event.target); });
    block.addEventListener("focusout", hide);
    block.addEventListener("keydown", function (event) {
      const from = index.get(event.target);
      if (from === undefined) return;
      const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
      if (event.key in steps) walk(from, steps[event.key]);
      else if (event.key === "Home") walk(-1, 1);
      else if (event.key === "End") walk(spans.length, -1);
      else if (event.key === "Escape") hide();
      else return;
      event.preventDefault();
    });
  });
  window.addEventListener("scroll", () => { if (shown) place(shown); }, { passive: true });

  document.querySelectorAll(".switch input").forEach(function (input) {
    input.addEventListener("change", function () {
      document.querySelectorAll(".tokens").forEach(function (block) {
        block.classList.remove("view-text", "view-rejected", "view-all");
        block.classList.add("view-" + input.value);
      });
      hide();
    });
  });
})();
