# The commands that people and CI use; each runs from a clean clone.
# Cargo's output directory follows CARGO_TARGET_DIR where that is set.

TARGET := $(or $(CARGO_TARGET_DIR),target)
BINARY := $(TARGET)/release/octokv

.PHONY: help demo build test check kernel-test bench hostile soak fuzz clean

help:
	@echo 'make demo         a node and a client on a temporary file: puts, gets, a kill, a restart, figures'
	@echo 'make test         install the packages that the tests need, then run every test (docs/TESTING.md)'
	@echo 'make check        the quick part: house rules, rustfmt, clippy, unit tests'
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
