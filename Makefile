# The commands that people and CI use; each runs from a clean clone.
# Cargo's output directory follows CARGO_TARGET_DIR where that is set.

TARGET := $(or $(CARGO_TARGET_DIR),target)
BINARY := $(TARGET)/release/octokv

.PHONY: help demo build test check loom kernel-test bench hostile soak fuzz clean

help:
	@echo 'make demo         a node and a client on a temporary file: puts, gets, a kill, a restart, figures'
	@echo 'make test         install the packages that the tests need, then run every test (docs/TESTING.md)'
	@echo 'make check        the quick part: house rules, rustfmt, clippy, unit tests'
	@echo 'make loom         model checking of the lock-free code: every interleaving of small cases'
	@echo 'make kernel-test  the Linux kernel as a client, alone'
	@echo 'make bench        the figures of docs/BENCHMARKS.md, beside a peer on the same disk'
	@echo 'make hostile      what attacks cost an honest host: its latency, quiet and under each'
	@echo 'make soak         a node in everything at once for MINUTES (default 30), held to its figures of before'
	@echo 'make fuzz         every fuzz target for FUZZ_SECONDS (default 60) each'

build:
	cargo build --release --quiet

demo: build
	$(BINARY) demo

test:
	scripts/install-test-packages
	scripts/test

check:
	cargo xtask tidy
	cargo test --quiet --workspace --lib --bins

# A separate output directory: the flag would otherwise rebuild everything. Without LTO it builds in seconds.
loom:
	RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=$(TARGET)/loom CARGO_PROFILE_RELEASE_LTO=off \
		cargo test --release -p octokv-runtime --test loom

kernel-test: build
	scripts/install-test-packages
	tests/kernel/run

bench: build
	scripts/install-test-packages
	scripts/bench

hostile:
	scripts/hostile

soak:
	scripts/soak $(MINUTES)

fuzz:
	scripts/fuzz

clean:
	cargo clean
