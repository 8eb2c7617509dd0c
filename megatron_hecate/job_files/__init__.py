"""Files in which people keep the settings of a job: launch scripts, YAML, JSON. Read for ``--check --settings``."""
