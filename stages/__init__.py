"""The stages of a run, one module each; imported as `ds4flow.stages` and reached from YAML only."""

if __name__ != "ds4flow.stages":
    # Imported as plain `stages` every class would exist twice.
    raise ImportError("import ds4flow.stages instead, after: pip install -e .")
