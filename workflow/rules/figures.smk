rule figure:
    input:
        experiments="results/tables/experiments.csv",
        code="results/plan/code/figure-{figure}.sha256",
    output:
        png="results/figures/{figure}.png",
        pdf="results/figures/{figure}.pdf",
    log:
        "results/logs/figures/{figure}.log",
    conda:
        "../../envs/dpprof.yaml"
    shell:
        "python workflow/scripts/draw_figure.py --figure {wildcards.figure}"
        " --tables results/tables --output {output.png:q} --output {output.pdf:q}"
        " 2>&1 | tee {log:q} >&2"
