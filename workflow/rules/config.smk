"""A look at the config files before anything is planned from them."""

import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError

# This file's folder is workflow/rules. A workflow that was fetched from elsewhere has no
# sources beside it: then dpprof is installed.
HERE = Path(str(workflow.current_basedir)).parents[1]
if (HERE / "src" / "dpprof").is_dir():
    sys.path.insert(0, str(HERE / "src"))
    # The profile may have imported another dpprof, which is installed.
    imported = sys.modules.get("dpprof")
    if imported and Path(imported.__file__).parents[1] != HERE / "src":
        for name in list(sys.modules):
            if name.partition(".")[0] == "dpprof":
                del sys.modules[name]

try:
    from dpprof.experiments.config.config_files import read_config_file
    from dpprof.experiments.config.validation import InputError
except ImportError as error:
    raise WorkflowError(
        f"{error}; Snakemake's Python needs pydantic, psutil and PyYAML to plan, and dpprof "
        "itself where the workflow is not run from a checkout"
    ) from None

# As a module of another workflow, dpprof gets its config from there.
IS_GIVEN_CONFIG = workflow.modifier.skip_configfile

# The folder that results are made in may have a config of its own.
CONFIG_FILE = "config/config.yaml"
if not Path(CONFIG_FILE).is_file():
    CONFIG_FILE = str(HERE / CONFIG_FILE)

# The profile has looked at a --configfile already, before Snakemake loaded it; without
# the profile this is the first that is known of it. Jobs do not ask again: the sweep
# goes on as planned, whatever becomes of the file.
if workflow.is_main_process and not IS_GIVEN_CONFIG:
    try:
        for path in workflow.overwrite_configfiles or [Path(CONFIG_FILE)]:
            read_config_file(path)
    except (InputError, OSError) as error:
        raise WorkflowError(str(error)) from None
