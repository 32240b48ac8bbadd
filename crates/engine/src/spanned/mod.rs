//! Volumes on several devices: a volume of any engine on each, and every key on one of them.
//!
//! ```text
//!   key ─▶ position on the ring ─▶ partition, of 256 ─▶ device ─▶ the volume of the engine on it
//!          list, scan, iterator ─▶ all devices, merged in their order
//!          device failed        ─▶ its keys answer with an error that names it; those of the others are served
//!          replaced             ─▶ it begins without keys
//!          added                ─▶ partitions of the others move to it
//!          overloaded           ─▶ its puts are stored in the swap region of another, and merged back
//! ```
//! - `partition_map`: which device has which keys; `partition_set`: some of its partitions; `shared_map`: the map that an operation has. `superblock`: what each device says of the volume.
//! - `volume`: format, open, verify. `devices`: which devices belong together. `replacement`: another device for one that is lost. `core`: one core's handles on the devices, and `engine`: its operations. `ring_merge`: listings and scans. `iterator`: snapshots of all devices, and
//!   `snapshot_gate`: why they are of one moment. `places`: the blocks of a device, and its index, in errors. `traffic`: bytes of keys and values by device.
//!   `device_addition`: another device behind the others. `rebalancing`: partitions that move to it, and `moving`: operations on their keys meanwhile; `settling`: their swapped keys before.
//!   `device_queue`: which operations may run on a device, by tokens.
//!   `swapping`: puts of an overloaded device that another stores. `swap_region`: where, and `guest_region`: a core's handle on that of another device. `swapped_keys`: which. `swapped_scan`: scans with them. `swap_notes`: what superblocks say of them.
//!   `swap_recovery`: which are found by an opening. `swap_replacement`: those of a device that is replaced. `swap_merges`: both store some at their homes.
//!   `yield_points`: those of a caller's sink, within an engine.
//!
//! Engines have no code for several devices: each device holds an ordinary volume of the engine, which begins behind the superblocks of the span.

mod core;
mod device_addition;
mod device_queue;
mod devices;
mod engine;
mod guest_region;
mod iterator;
mod moving;
mod partition_map;
mod partition_set;
mod places;
mod rebalancing;
mod replacement;
mod ring_merge;
mod settling;
mod shared_map;
mod snapshot_gate;
mod superblock;
mod swap_merges;
mod swap_notes;
mod swap_recovery;
mod swap_region;
mod swap_replacement;
mod swapped_keys;
mod swapped_scan;
mod swapping;
mod traffic;
mod volume;
mod yield_points;

pub use device_queue::{DeviceQueue, QueueAdmission, QueueClosed};
pub use engine::SpannedEngine;
pub use iterator::SpannedIterator;
pub use partition_map::{PartitionMap, PlannedMove, SPAN_DEVICES_MAX};
pub use partition_set::{PartitionSet, SPAN_PARTITIONS};
pub use shared_map::MoveStage;
pub use superblock::SpanSuperblock;
pub use swap_notes::SwapNotes;
pub use swap_region::{SWAP_UNIT_BYTES, check_swaps};
pub use volume::SpannedVolume;
