# Trainings that learn: what privacy costs in accuracy. A sweep of its own, of config/learning.yaml:
#   snakemake --snakefile workflow/learning.smk
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError

HERE = Path(str(workflow.current_basedir)).parent
sys.path[:0] = [str(HERE / "src"), str(HERE / "perf")]

from dpprof.experiments.config.validation import InputError
from dpprof.experiments.planning.code_digest import file_digest
from dpprof.experiments.planning.job_environment import offer_interpreter
from dpprof.system.files import write_if_changed
from learning_plan import read_sweep

FOLDER = Path("results/learning")
SCRIPTS = [HERE / "perf" / f"{name}.py" for name in ("learning", "learning_report")]
CODE = FOLDER / "plan" / "code"

if workflow.is_main_process:
    try:
        offer_interpreter()
        CELLS = read_sweep(
            Path(config.get("learning", HERE / "config/learning.yaml"))
        ).plan()
        for cell in CELLS:
            spec = FOLDER / "plan" / f"{cell.name}.json"
            write_if_changed(spec, f"{cell.model_dump_json()}\n")
        files = [
            *(HERE / "src/dpprof/private").rglob("*.py"),
            *(HERE / "perf").glob("learning*.py"),
        ]
        digests = [
            f"{file_digest(path)} {path.name}\n"
            for path in sorted({*files} - {SCRIPTS[1]})
        ]
        write_if_changed(CODE, "".join(digests))
    except (InputError, OSError) as error:
        raise WorkflowError(str(error)) from None
    NAMES = [cell.name for cell in CELLS]


localrules:
    learning,


wildcard_constraints:
    cell=r"[a-z]+-[a-z]+-[a-z0-9._-]+",


rule learning:
    default_target: True
    input:
        cells=(
            expand(FOLDER / "{cell}.json", cell=NAMES)
            if workflow.is_main_process
            else []
        ),
        script=SCRIPTS[1],
    output:
        csv=FOLDER / "learning.csv",
        figure=FOLDER / "figures/learning.png",
        report=FOLDER / "report.md",
    log:
        "results/logs/learning/report.log",
    conda:
        "../envs/dpprof.yaml"
    shell:
        "python {input.script:q} {input.cells:q} --output-dir results/learning > {log:q} 2>&1"


# The model that adapters begin with, once for all cells.
rule pretrain:
    input:
        code=CODE,
        script=SCRIPTS[0],
    output:
        FOLDER / "pretrained.pt",
    log:
        "results/logs/learning/pretrained.log",
    conda:
        "../envs/dpprof.yaml"
    threads: 1
    shell:
        "python {input.script:q} --output {output:q} > {log:q} 2>&1"


# One process and one JSON per cell, which has all seeds.
rule train:
    input:
        cell=FOLDER / "plan/{cell}.json",
        code=CODE,
        pretrained=lambda wildcards: (
            FOLDER / "pretrained.pt" if wildcards.cell.startswith("adapters") else []
        ),
        script=SCRIPTS[0],
    output:
        FOLDER / "{cell}.json",
    log:
        "results/logs/learning/{cell}.log",
    conda:
        "../envs/dpprof.yaml"
    threads: 1
    params:
        pretrained=lambda wildcards, input: (
            f"--pretrained {input.pretrained}" if input.pretrained else ""
        ),
    shell:
        "python {input.script:q} --cell {input.cell:q} {params.pretrained}"
        " --output {output:q} > {log:q} 2>&1"
