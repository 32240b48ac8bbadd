# The commands that people and CI use; each runs from a clean clone.
# Cargo's output directory follows CARGO_TARGET_DIR if that is set.

TARGET := $(or $(CARGO_TARGET_DIR),target)
BINARY := $(TARGET)/release/octokv

.PHONY: help demo build test check loom kernel-test log-memory log-overwrites bench ordered-measurements capped-memory core-scaling device-failure adversary mutants power-loss soak fuzz clean

help:
	@echo 'make demo         a node and a client on a temporary file: puts, gets, a kill, a restart'
	@echo 'make test         install the packages that the tests need, then run every test (docs/TESTING.md)'
	@echo 'make check        the quick part: repository lints, rustfmt, clippy, unit tests'
	@echo 'make loom         model checking of the lock-free code: every interleaving of small cases'
	@echo 'make kernel-test  the Linux kernel as a client, alone'
	@echo 'make bench        the figures of docs/BENCHMARKS.md, with baselines on the same disk'
	@echo 'make ordered-measurements  seeks after deletes, scans beside collection, amplification, opening after a kill'
	@echo 'make capped-memory  the log engine beside RocksDB with little memory, as root: two hours and 60 GB of disk'
	@echo 'make core-scaling requests replayed on 1 and 2 cores without the network'
	@echo 'make device-failure  a node on four devices under load, of which one is pulled and replaced'
	@echo 'make adversary    latency of a well-behaved client, without and with each attack'
	@echo 'make mutants      cargo-mutants over the engine, SHARD=k/n of it (default 0/8), resumable'
	@echo 'make power-loss   power loss at sampled events of OPERATIONS (default 100000) of the ordered engine'
	@echo 'make log-memory   memory and opening of the log engine with OBJECTS (default 100000000); takes 9 GB of memory and 40 minutes'
	@echo 'make log-overwrites  20 overwrites at random of a log volume of MIB (default 64) of which 90 % live'
	@echo 'make soak         everything at once for MINUTES (default 30); resource usage must equal that at the start'
	@echo 'make fuzz         every fuzz target for FUZZ_SECONDS (default 60) each'

build:
	cargo build --release --quiet

demo: build
	$(BINARY) demo

test:
	scripts/test

check:
	cargo xtask tidy
	cargo test --quiet --workspace --lib --bins

# The whole workspace is selected, so that cargo resolves the dependencies' features as for the other tests and shares them.
loom:
	cargo test --workspace --features octokv-sys/loom,octokv-runtime/loom,octokv-engine/loom --test loom

kernel-test: build
	scripts/install-test-packages
	tests/kernel/run

bench: build
	scripts/install-test-packages
	scripts/bench

ordered-measurements:
	scripts/ordered-measurements

capped-memory:
	scripts/install-test-packages
	scripts/capped-memory

core-scaling:
	scripts/core-scaling

device-failure:
	scripts/device-failure

adversary:
	scripts/adversary

mutants:
	scripts/mutants $(SHARD)

power-loss:
	OCTOKV_POWER_LOSS_OPERATIONS=$(or $(OPERATIONS),100000) cargo test --release -p octokv-engine --test suite -- \
		lsm_power_loss::acknowledged_writes_survive_power_loss_at_sampled_events_of_a_long_run

log-memory:
	OCTOKV_LOG_OBJECTS=$(or $(OBJECTS),100000000) cargo test --release -p octokv-engine --test memory -- --nocapture \
		log_memory::an_object_takes_less_than_half_a_byte_of_memory

log-overwrites:
	for bytes in 256 1024; do \
		OCTOKV_LOG_OVERWRITE_MIB=$(or $(MIB),64) OCTOKV_LOG_OVERWRITE_VALUE_BYTES=$$bytes \
			cargo test --release -p octokv-engine --test suite -- --nocapture log_overwrites || exit 1; \
	done

soak:
	scripts/soak $(MINUTES)

fuzz:
	scripts/fuzz

clean:
	cargo clean
