"""Shell completion of groups, keys and their values, without starting Hydra."""

from __future__ import annotations

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    add_completion_class,
    get_completion_class,
)

_BASH = """\
%(complete_func)s() {
    local line=${COMP_LINE:0:COMP_POINT} response prefix=
    local cur=${line##*[[:space:]]}
    # bash cuts words at = and :, and completes only what comes after
    [[ $COMP_WORDBREAKS == *=* && $cur == *=* ]] && prefix=${cur%%=*}=
    [[ $COMP_WORDBREAKS == *:* && $cur == *:* ]] && prefix=${cur%%:*}:
    local words=($line)
    local count=${#words[@]}
    [[ $line == *[[:space:]] ]] || count=$((count - 1))
    COMPREPLY=()
    while IFS= read -r response; do
        [[ ${response%%%%,*} == plain ]] && COMPREPLY+=("${response#plain,}")
        [[ ${response%%%%,*} == file ]] && compopt -o default
    done < <(env COMP_WORDS="$line" COMP_CWORD=$count %(complete_var)s=bash_complete $1)
    COMPREPLY=("${COMPREPLY[@]#"$prefix"}")
    [[ ${COMPREPLY[0]} == *[=.] ]] && compopt -o nospace
}
complete -F %(complete_func)s %(prog_name)s
"""


@add_completion_class
class WholeWordBash(BashComplete):
    """click's bash completion, for words with `=` inside."""

    source_template = _BASH

    def source(self) -> str:
        """The script; click's own also checks the version of bash, which this one does not need."""
        return self.source_template % self.source_vars()


def script(shell: str, command: click.Command) -> str:
    """The script to source in `shell`."""
    cls = get_completion_class(shell)
    if cls is None:
        raise click.UsageError(f"no completion for {shell}")
    return cls(command, {}, "ds4flow", "_DS4FLOW_COMPLETE").source()


def complete_override(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Words that may follow: `GROUP=OPTION`, `KEY=`, and the values of a key that are few."""
    from ds4flow import schema

    name, equal, _ = incomplete.partition("=")
    if not equal:
        candidates = [f"{group}=" for group in (*schema.GROUPS, "experiment")]
        candidates += [f"{key.name}=" for key in schema.KEYS.values() if _settable(key)]
    elif name in schema.KEYS:
        candidates = [f"{name}={value}" for value in _values(schema.KEYS[name])]
    else:
        candidates = [f"{name}={option}" for option in _options(name)]
    return [CompletionItem(word) for word in candidates if word.startswith(incomplete)]


def _settable(key: object) -> bool:
    from ds4flow.schema import Key

    return isinstance(key, Key) and not key.limits.link and not key.name.endswith("._target_")


def _values(key: object) -> tuple[str, ...]:
    from ds4flow.schema import Key

    if not isinstance(key, Key):
        return ()
    return ("true", "false") if key.type is bool else key.limits.choices


def _options(group: str) -> list[str]:
    from importlib import resources

    folder = resources.files("ds4flow.conf") / group
    if not group.isidentifier() or not folder.is_dir():
        return []
    names = (file.name for file in folder.iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))
