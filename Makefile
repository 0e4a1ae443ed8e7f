# Every target makes its environment first; VENV=path puts it elsewhere.
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: env demo notebooks test test-rest test-both test-all lint docs dist gpu real real-all replicate versions

env: $(READY)

demo: $(READY)
	$(BIN)/megasink demo
	@echo "to have megasink on the path: source $(BIN)/activate"

# Runs examples/notebooks again, in place. Jupyter comes here, so that the others need not wait for it.
notebooks: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt nbclient==0.11.0 ipykernel==7.4.0
	cd examples/notebooks && PYTHONWARNINGS="ignore:IProgress" "$(abspath $(BIN))/jupyter" execute --inplace *.ipynb

# A file's tests share a worker and its fixtures; the order of the files is that of tests/schedule.py.
WORKERS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile
PYTEST += --no-loadscope-reorder

# A sample of every room, then what a change must pass besides, then everything (tests/schedule.py).
test: $(READY)
	$(PYTEST) -m 'first and not replicate'

test-rest: $(READY)
	$(PYTEST) -m 'rest and not replicate'

# Both in one session, which imports everything once: the CI.
test-both: $(READY)
	$(PYTEST) -m '(first or rest) and not replicate'

test-all: $(READY)
	$(PYTEST) -m 'not replicate'

# The fast form of every experiment, one after another; less than 5 minutes each on two cores.
replicate: $(READY)
	$(BIN)/python -m pytest -m replicate examples/replicate/tests

# What megasink shows in models that people use: pictures in minutes; then everything, which takes hours.
# MODEL=FOLDER takes another folder of Hugging Face.
real: $(READY)
	$(BIN)/python -m examples.real_models.run $(MODEL)

real-all: $(READY)
	$(BIN)/python -m examples.real_models.run --all $(MODEL)

# A sample of the tests with the oldest and the newest versions of torch, transformers and Megatron, each in
# an environment of its own (5 GB); the table of docs/verified.md is then made again.
versions: $(READY)
	$(BIN)/python -m tests.versions
	$(BIN)/python -m tests.verified

# On a machine with a GPU: checks and benchmarks, and a report of them. REPORT=path puts it elsewhere.
# PYTHON=path takes a Python that has torch, and makes no environment; WHEELS=folder adds to it.
REPORT ?= gpu-report
gpu: $(if $(PYTHON),,$(READY))
	$(or $(PYTHON),$(BIN)/python) benchmarks/gpu.py --output $(REPORT) $(if $(WHEELS),--wheels $(WHEELS))

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation as a site in build/site; a broken link is an error. It opens without a server,
# but the search needs one: python -m http.server --directory build/site
docs: $(READY)
	$(BIN)/python -m tests.errors_page build/errors.md
	$(BIN)/python tools/site.py build/site --errors build/errors.md

# The source distribution and the wheel made from it, in dist.
dist: $(READY)
	$(BIN)/python -m build --outdir dist

# Made again when what it was made from changes. A broken install leaves no stamp.
$(READY): pyproject.toml constraints.txt tools/make_env.sh
	tools/make_env.sh $(VENV)
	@touch $@
