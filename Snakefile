from snakemake.utils import min_version

min_version("9.27")


report: "workflow/report/workflow.rst"


include: "workflow/rules/config.smk"


# A --configfile replaces the default sweep instead of being merged into it.
if not workflow.overwrite_configfiles:

    configfile: CONFIG_FILE


# Only used with --sdm apptainer.
container: config.get("container")


include: "workflow/rules/common.smk"
include: "workflow/rules/profile.smk"
include: "workflow/rules/verify.smk"
include: "workflow/rules/ceilings.smk"
include: "workflow/rules/tables.smk"
include: "workflow/rules/figures.smk"
include: "workflow/rules/report.smk"


rule all:
    default_target: True
    input:
        rules.report.output,
        rules.report.input.figures,
        rules.tables.output,
