//! The static mapping between cores and drives (LEED, SIGCOMM 2023, §3.4): which core executes the operations of a key.
//!
//! ```text
//!   as many drives as cores, or more   a drive has one core, a core every so many drives
//!   fewer                              a drive has every so many cores, each a part of the ring
//! ```
//! In: a key's device and position. Out: a core. Invariant: with as many drives as cores, or a multiple, each core has as many.

use octokv_base::RingPosition;

/// The core, of `cores`, of a key at a position, on one of so many devices.
///
/// # Panics
/// No cores or no devices.
pub fn core_of_drive((device, devices): (usize, usize), position: RingPosition, cores: usize) -> usize {
    if devices >= cores {
        return device % cores;
    }
    let cores_of_device = (cores - device).div_ceil(devices);
    let part = ((position.0 >> 64) * cores_of_device as u128) >> 64;
    device + devices * part as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// The cores of a device.
    fn cores_of(device: usize, devices: usize, cores: usize) -> Vec<usize> {
        let at = |part: u128| RingPosition(part << 118);
        let found: BTreeSet<_> =
            (0..1024).map(|part| core_of_drive((device, devices), at(part), cores)).collect();
        found.into_iter().collect()
    }

    #[test]
    fn a_drive_has_one_core_and_a_core_as_many_drives_as_another() {
        let cores =
            |devices, cores| (0..devices).map(|device| cores_of(device, devices, cores)).collect::<Vec<_>>();
        assert_eq!(cores(4, 4), [[0], [1], [2], [3]]);
        assert_eq!(cores(4, 2), [[0], [1], [0], [1]]);
        assert_eq!(cores(3, 1), [[0], [0], [0]]);
    }

    #[test]
    fn fewer_drives_than_cores_have_all_cores_and_no_core_two() {
        assert_eq!(cores_of(0, 1, 4), [0, 1, 2, 3]);
        assert_eq!((cores_of(0, 2, 5), cores_of(1, 2, 5)), (vec![0, 2, 4], vec![1, 3]));
    }

    #[test]
    fn the_cores_of_a_drive_have_equal_parts_of_the_ring() {
        let of = |part: u128| core_of_drive((1, 2), RingPosition(part << 120), 6);
        let parts: Vec<_> = (0..256).map(of).collect();
        assert_eq!([1, 3, 5].map(|core| parts.iter().filter(|&&at| at == core).count()), [86, 85, 85]);
    }
}
