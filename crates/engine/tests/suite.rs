//! The engines' tests: conformance, the contract, power loss, damaged media, maintenance, formats.
//! One binary: a second one would compile the node's generic code again.

mod cached_values;
mod common;
#[path = "common/corrupt_images.rs"]
mod corrupt_images;
#[path = "common/corrupt_log_images.rs"]
mod corrupt_log_images;
mod hash_abandoned;
mod hash_conformance;
mod hash_contract;
mod hash_corrupt_images;
mod hash_direct;
mod hash_disk_bytes;
mod hash_fixtures;
mod hash_group_commit;
mod hash_maintenance;
mod hash_open_errors;
mod hash_power_loss;
mod hash_prepare;
mod hash_recovery_checkpoint;
mod hash_recovery_journal;
mod hash_salvage;
mod hash_simulated_ssd;
mod hash_upgrade;
mod log_accesses;
mod log_cached;
mod log_capacity;
mod log_conformance;
mod log_corrupt_images;
mod log_damage;
mod log_device_errors;
mod log_faults;
mod log_fixtures;
mod log_full;
mod log_long_keys;
mod log_overwrites;
mod log_power_loss;
mod log_ranges;
mod log_scrub;
mod log_statistics;
mod lsm_conformance;
mod lsm_corrupt_images;
mod lsm_damage;
mod lsm_device_errors;
mod lsm_extremes;
mod lsm_faults;
mod lsm_fixtures;
mod lsm_full;
mod lsm_iterators;
mod lsm_pace;
mod lsm_power_loss;
mod lsm_statistics;
mod lsm_value_reads;
mod lsm_version_memory;
mod memory_contract;
mod spanned_abandoned;
mod spanned_conformance;
mod spanned_devices;
mod spanned_iterators;
mod spanned_power_loss;
mod spanned_queue;
mod spanned_replacement;
mod spanned_swap;
mod spanned_swap_replacement;
#[path = "common/version_memory.rs"]
mod version_memory;
