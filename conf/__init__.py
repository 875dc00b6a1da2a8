"""Every knob, stage and order of a run, as YAML; installed as `ds4flow.conf`."""
