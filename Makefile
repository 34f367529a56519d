.PHONY: help setup quickstart test quick portable slow ptx soak mutants reference gpu gputests audit lint format

# `make gpu` takes these from the command line or the environment.
PYTHON ?= python3
OUT ?= docs/gpu-results/$(shell date +%F)
BUDGET ?= 540

# The GPU tests spend most of their time compiling, so they run in parallel with pytest-xdist. Tests that need much memory
# share one process.
GPU_WORKERS = $(shell $(PYTHON) -c "import xdist" 2>/dev/null && printf -- "-n 6 --dist loadgroup")

GPU_TESTS = tests/kernels/test_triton.py tests/kernels/test_aligned.py tests/kernels/test_triton_jvp.py tests/kernels/test_triton_low_precision.py tests/kernels/test_triton_decode.py tests/kernels/test_triton_paged.py tests/kernels/test_triton_states.py tests/kernels/test_dropout.py

help:            ## show this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

setup:           ## create .venv (or use the active environment) and install everything
	bash launch/setup.sh

quickstart:      ## train and generate on this machine
	bash launch/quickstart.sh

test:            ## lint, then the fast tests
	bash launch/test.sh

quick:           ## lint, then the tests of tests/quick.txt: one to two minutes on two cores
	bash launch/test.sh @tests/quick.txt

portable:        ## the files of tests/numeric.txt as on an older processor: SSE4, 4 threads; ARGS= for other tests
	bash launch/portable.sh $(ARGS)

slow:            ## the slow tests
	bash launch/test.sh -m slow

ptx:             ## what ptxas makes of the Triton kernels; all Triton tests on what is compiled for sm_80 and sm_90, executed on the CPU: half an hour on one core
	failed=0; python -m pytest -m '' tests/kernels/test_machine_code.py || failed=1; for arch in sm_80 sm_90; do python -m pytest -m '' --ptx $$arch $(GPU_TESTS) tests/ptx || failed=1; done; exit $$failed

soak:            ## half an hour of training and generation on an emulated cluster, in which ranks are lost
	PYTHONPATH=. python -m tests.soak

mutants:         ## change merge.py and layout/ in hundreds of places, one at a time; which changes do the tests miss? pip install mutmut
	OMP_NUM_THREADS=1 python -m mutmut run && python -m mutmut results

reference:       ## HTML of TreeConfig and the public functions from their docstrings, in build/reference; pip install pdoc
	PYTHONPATH=. python -m pdoc --docformat google --no-show-source -o build/reference megatron_tree \
		'!megatron_tree\.(core|tools|inference|launching|__main__|integrations)' \
		megatron_tree.integrations.megatron megatron_tree.integrations.transformers megatron_tree.integrations.deepspeed

gpu:             ## ten minutes on a machine with a GPU: checks and times every kernel; OUT=, PYTHON=, BUDGET=, ARGS=
	$(PYTHON) launch/gpu.py --out "$(OUT)" --budget $(BUDGET) $(ARGS)

gputests:        ## the tests of the kernels on a GPU; needs pytest and hypothesis
	$(PYTHON) -m pytest $(GPU_WORKERS) tests/gpu $(GPU_TESTS)

audit:           ## check the pinned dependencies for known vulnerabilities; needs a network that reaches PyPI itself
	folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && python3 -m venv "$$folder" && \
	"$$folder/bin/pip" install -q pip-audit && \
	"$$folder/bin/pip-audit" --strict --no-deps --disable-pip --progress-spinner off -r constraints.txt

lint:            ## ruff
	bash launch/test.sh --lint-only

format:          ## ruff fixes and formats the sources
	bash launch/test.sh --format
