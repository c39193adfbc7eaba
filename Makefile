# What CI and people call. `make serve` is the shortest way to a running server.

CARGO ?= cargo
TARGET := $(or $(CARGO_TARGET_DIR),target)
TRIREME := $(TARGET)/release/trireme
MODEL ?= smollm2
TP ?= 2
PROMPT ?= What is the capital of France?

.PHONY: build serve demo test lint bench cuda test-gpu bench-gpu docker

# The three programs; one profile serves everything, so nothing is built twice.
build:
	$(CARGO) build --release --workspace --bins

serve: build
	exec $(TRIREME) serve $(MODEL) --tp $(TP)

demo: build
	$(TRIREME) generate $(MODEL) --tp $(TP) --chat --max-new-tokens 40 --prompt "$(PROMPT)"

# Fetches the small real model once (SHA-256 checked), then runs every test of the workspace.
test: build
	$(TRIREME) download smollm2
	TRIREME_SMOLLM2="$$($(TRIREME) where smollm2)" $(CARGO) test --release --workspace

lint:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --release --workspace --all-targets -- -D warnings
	TRIREME_CUDA_ARCHITECTURES=none $(CARGO) clippy --release --workspace --all-targets --features trireme-shard/cuda -- -D warnings
	@if $(CARGO) deny --version >/dev/null 2>&1; then $(CARGO) deny check licenses bans sources; \
	else echo "cargo-deny is not installed: licences and sources were not checked"; fi

bench: build
	$(TRIREME) bench $(MODEL) --tp $(TP)

# The three programs, the shard for NVIDIA GPUs too. Needs nvcc: eval "$$(scripts/cuda-toolchain)" where
# there is no CUDA toolkit.
cuda:
	$(CARGO) build --release --workspace --bins --features trireme-shard/cuda

test-gpu:
	scripts/test-gpu

bench-gpu:
	scripts/bench-gpu

docker:
	@echo "There is no image yet"; exit 1
