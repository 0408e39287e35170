# `make` measures, reports and prints the answer, `make test` tests, `make test-slow` runs the tests
# that take long, `make examples` trains, `make learning` measures what privacy costs in accuracy, `make install` only sets
# up, `make docs` builds the documentation, `make perf` measures what dpprof itself costs.
# MODEL, TARGET and EPSILON ask the default sweep about another model, GPU and budget, as in
# make MODEL=hf:qwen2.5-0.5b TARGET=l40s; CONFIG=path replaces it. PYTHON chooses the interpreter; WORKERS says how many
# processes share the tests.

PYTHON ?= python3
CONFIG ?=
MODEL ?=
TARGET ?=
EPSILON ?=
CORES ?= all
WORKERS ?= 3

VENV := .venv
comma := ,
INSTALLED := $(VENV)/installed
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

.PHONY: report install test test-slow examples learning lint docs gallery perf schemas answers lock clean
.DEFAULT_GOAL := report

# What is asked instead: Hugging Face's models with adapters and whole, others from scratch and whole.
ANSWERED := $(if $(filter hf:%,$(MODEL)),from-scratch: none,from-scratch: {model: "$(MODEL)"}$(comma) adapters: none)
ASKED := $(if $(MODEL),'sweeps={$(ANSWERED)}') \
  $(if $(MODEL)$(TARGET),'defaults={$(if $(MODEL),model: "$(MODEL)"$(comma)) $(if $(TARGET),target: "$(TARGET)")}') \
  $(if $(EPSILON),'privacy={epsilon: [$(EPSILON)]}')
BOTH = CONFIG replaces the sweep that MODEL, TARGET and EPSILON ask about: give CONFIG, or them

report: install
	$(if $(and $(CONFIG),$(strip $(ASKED))),$(error $(BOTH)))
	snakemake --cores $(CORES) $(if $(CONFIG),--configfile $(CONFIG)) $(if $(strip $(ASKED)),--config $(ASKED))
	@awk '/^#/ { shown = NR == 1 || /Can I believe this/ } shown { gsub(/\\/, ""); print }' results/report.md

install: $(INSTALLED)

$(INSTALLED): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v < (3, 14) else "dpprof needs Python 3.11, 3.12 or 3.13, and $(PYTHON) is %d.%d; try make PYTHON=python3.12" % v)'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

test: install
	python -m pytest -n $(WORKERS) --dist worksteal

# What is exhaustive, or a second whole sweep of its kind: CONTRIBUTING.md has the rule.
test-slow: install
	python -m pytest -m slow

# Private trainings with generated data, each of which ends with what it spent.
EXAMPLES := pretrain_gpt finetune_llama_lora classify_text classify_images
examples: install
	@set -e; for one in $(EXAMPLES); do \
	  echo "examples/$$one.py"; \
	  python examples/$$one.py > .example.log; cat .example.log; grep --quiet '^epsilon [0-9]' .example.log; \
	done; rm .example.log
	torchrun --nproc-per-node 2 examples/two_ranks.py
	python examples/run_notebook.py examples/private_finetuning.ipynb

# Trainings that learn, with dpprof and with Opacus, over epsilon.
learning: install
	snakemake --snakefile workflow/learning.smk --cores $(CORES)

# Style, types, import rules and the workflow's own linter.
lint: install
	ruff check .
	ruff format --check .
	snakefmt --check Snakefile workflow
	mypy
	lint-imports
	snakemake --lint

# The documentation as a site, into site/. A dead link or anchor fails, and so does a page that would
# load something from a network.
docs: install
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict
	@! grep --extended-regexp --recursive --include='*.html' '<(script|link|img|iframe)[^>]* (src|href)="?(https?:)?//' site

# The documentation's gallery, of the thorough sweep: a quarter of an hour.
gallery: install
	snakemake --cores $(CORES) --configfile config/thorough.yaml
	python workflow/scripts/gallery.py

# What dpprof itself costs: a step beside a bare loop, recording memory, monitoring, reporting on
# many results; how exact recorded memory is; and what its methods cost beside others.
perf: install
	python perf/overhead.py --output perf/overhead.md
	taskset -c 1 python perf/cheap_runs.py --output perf/cheap_runs.md
	python perf/questions.py --output perf/questions.md
	python perf/recording.py --output perf/recording.md
	python perf/accuracy.py --output perf/accuracy.md
	python perf/methods.py --output perf/methods.md --figure docs/images/methods.png
	python perf/monitor.py --output perf/monitor.md
	python perf/trainer.py --output perf/trainer.md
	python perf/correlated.py --output perf/correlated.md
	python perf/host_time.py --output perf/host_time.md
	python perf/scale.py --output perf/scale.md

# Schemas and the key tables of config/README.md, from the pydantic models.
schemas: install
	python workflow/scripts/write_schemas.py

# Answers to the questions that the documentation asks, kept in the package; and the page of what fits.
answers: install
	python workflow/scripts/answers.py
	python workflow/scripts/what_fits.py

# Newest versions that pyproject.toml allows, with torch pinned; review the diff.
lock:
	rm -rf $(VENV)-lock
	$(PYTHON) -m venv $(VENV)-lock
	$(VENV)-lock/bin/python -m pip install --quiet torch==2.13.0
	$(VENV)-lock/bin/python -m pip install --quiet --editable '.[dev]'
	(echo "# Written by make lock. No hashes: torch may come from a build of the machine's own."; \
	 $(VENV)-lock/bin/python -m pip freeze --all --exclude-editable \
	 | grep -vE '^(pip|nvidia-[a-z0-9-]+-cu[0-9]+|triton|cuda-[a-z-]+)==' | sed 's/+cpu$$//') > requirements.lock
	rm -rf $(VENV)-lock

clean:
	rm -rf results site .snakemake
