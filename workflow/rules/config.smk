"""A look at the config files before anything is planned from them."""

import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError

sys.path.insert(0, str(Path(workflow.basedir) / "src"))

from dpprof.spec.config_files import read_config_file
from dpprof.spec.validation import InputError

# The profile has looked at a --configfile already, before Snakemake loaded it; without
# the profile this is the first that is known of it. Jobs do not ask again: the sweep
# goes on as planned, whatever becomes of the file.
if workflow.is_main_process:
    try:
        for path in workflow.overwrite_configfiles or [Path("config/config.yaml")]:
            read_config_file(path)
    except (InputError, OSError) as error:
        raise WorkflowError(str(error)) from None
