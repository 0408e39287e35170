rule tables:
    input:
        manifest=manifest_of,
        results=results_of,
        verdicts=verdicts_of,
        ceilings=ceilings_of,
        due=due_of,
        code="results/plan/code/tables.sha256",
    output:
        runs="results/tables/runs.csv",
        experiments="results/tables/experiments.csv",
        settings="results/tables/settings.csv",
        methods="results/tables/methods.csv",
        outcomes="results/tables/outcomes.csv",
        steps="results/tables/steps.csv",
        phases="results/tables/phases.csv",
        snapshots="results/tables/snapshots.csv",
        components="results/tables/components.csv",
        advice="results/tables/advice.csv",
        peaks="results/tables/peaks.csv",
        costs="results/tables/costs.csv",
        owners="results/tables/owners.csv",
        holdings="results/tables/holdings.csv",
        timeline="results/tables/timeline.csv",
        traffic="results/tables/traffic.csv",
        kernels="results/tables/kernels.csv",
        traces="results/tables/traces.csv",
        instrument_overhead="results/tables/instrument_overhead.csv",
        samplers="results/tables/samplers.csv",
        verification="results/tables/verification.csv",
        ceilings="results/tables/ceilings.csv",
        findings="results/tables/findings.csv",
        missing="results/tables/missing.csv",
        manifest="results/tables/manifest.txt",
    log:
        "results/logs/tables.log",
    conda:
        "../../envs/dpprof.yaml"
    params:
        ceilings=ceilings_paths,
        partial=PARTIAL,
    shell:
        "python workflow/scripts/build_tables.py --manifest {input.manifest:q}"
        " --output-dir results/tables --ceilings {params.ceilings:q} {params.partial}"
        " --log {log:q}"
