//! The replacement of a lost device of several by one that begins empty, while the others are served.
//!
//! ```text
//!   volume formatted on the new device ─▶ replacements counted on the others ─▶ superblock on the new device ─▶ members ─▶ handles of the cores
//!            └ crash: as before                  └ crash: neither device is one of the volume, until it is replaced again
//! ```
//! In: the place of a device whose keys the operator gives up, and a device without data. Out: its keys are found missing, and can be stored. Invariants: from the first count on the lost
//! device is absent wherever one that has counted is given with it, so that what it holds is never mixed with what came after; no core serves the lost device once one serves the new one; the others go on meanwhile, and an
//! iterator that had begun fails at its next call.
//! Tested in `tests/spanned_replacement.rs`, and by the scenario `devices` of the simulator.

use super::devices::replacements_of;
use super::engine::SpannedEngine;
use super::partition_map::SPAN_DEVICES_MAX;
use super::superblock::SpanSuperblock;
use super::swap_recovery::recover_swaps;
use super::volume::{Member, SpannedVolume, format_member, member_config, member_open_config};
use crate::bug_injection::{self, InjectedBug};
use crate::common::superblock::DeviceOfVolume;
use crate::common::superblock_io::{erase_superblocks, read_superblock, write_superblock};
use crate::{FormatConfig, HashKind, OpenConfig, OpenError, Volume};
use octokv_base::BufferPool;
use octokv_device::Device;
use std::rc::Rc;

impl<V: Volume> SpannedVolume<V> {
    /// Whether `devices[given]` is the replacement of the last completed call for this place: the node was stopped before it recorded the
    /// new path.
    /// `devices` as in [`SpannedVolume::replace`].
    pub async fn is_replaced_by(&self, devices: &[Rc<dyn Device>], given: usize) -> bool {
        let index = self.index_of(given);
        let (_, replacements) = self.told(devices, given).await;
        let own = read_superblock::<SpanSuperblock>(&*devices[given]).await;
        let of_volume = |superblock: &SpanSuperblock| {
            let is_same = superblock.volume_id == self.superblock().volume_id;
            is_same && usize::from(superblock.device.index) == index
        };
        let is_newest = |superblock: &SpanSuperblock| {
            superblock.replacements[index] > 0 && superblock.replacements[index] == replacements[index]
        };
        own.is_ok_and(|(superblock, _)| of_volume(&superblock) && is_newest(&superblock))
    }

    fn index_of(&self, given: usize) -> usize {
        let members = self.all_members();
        members.iter().position(|member| member.given == given).expect("a device of the volume")
    }

    /// The superblocks of the other available devices, with their places in the list, and the highest replacement count of each index.
    async fn told(
        &self,
        devices: &[Rc<dyn Device>],
        given: usize,
    ) -> (Vec<(usize, SpanSuperblock)>, [u8; SPAN_DEVICES_MAX]) {
        let mut told = Vec::new();
        for other in self.all_members() {
            let device = &devices[other.given];
            // One that is lost itself is replaced later, or gets the counts when it is opened again.
            if other.given != given
                && other.serves(device)
                && let Ok((superblock, _)) = read_superblock::<SpanSuperblock>(&**device).await
            {
                told.push((other.given, superblock));
            }
        }
        let known = self.superblock();
        let replacements = replacements_of(told.iter().map(|(_, superblock)| superblock).chain([&known]));
        (told, replacements)
    }

    /// Puts an empty volume on the device `devices[given]` in the place of one that is lost; or, with `adopts`, the volume that is there if it
    /// [is that of the last replacement](SpannedVolume::is_replaced_by). `devices` are in the order with which the volume was opened;
    /// `prepare` gets the new volume before it is served. Handles get it by [`SpannedVolume::renew_engine`].
    ///
    /// # Errors
    /// - The new device is too small, or fails.
    /// - [`OpenError::OtherFormat`], [`OpenError::SpanHash`]: the configured format differs from that of the other devices.
    /// - [`OpenError::NotCounted`]: no other device is available to record the replacement; a device error if one of them fails to.
    /// - [`OpenError::ReplacementsMax`].
    ///
    /// The open volume is unchanged, except: once a device may have recorded the replacement, the lost one does not serve any more, and is absent at the next opening. The call may be repeated.
    pub async fn replace(
        &self,
        (devices, given, adopts): (&[Rc<dyn Device>], usize, bool),
        pool: &BufferPool,
        (config, format): (&OpenConfig, &FormatConfig),
        prepare: impl FnOnce(&V),
    ) -> Result<(), OpenError> {
        if format.hash != HashKind::Xxh3 {
            return Err(OpenError::SpanHash);
        }
        let (device, index) = (&devices[given], self.index_of(given));
        let _structure = self.shared().structure.exclude().await;
        let known = self.superblock();
        let _notes = self.shared().exclude_notes().await;
        let is_there = adopts && self.is_replaced_by(devices, given).await;
        // More is known of a replacement that did not come to its end.
        let (told, mut replacements) = self.told(devices, given).await;
        if !is_there {
            let count = replacements[index].checked_add(1);
            replacements[index] = count.ok_or(OpenError::ReplacementsMax { index: index as u16 })?;
        }
        let format = member_config(format, &known, index, replacements[index]);
        if !is_there {
            erase_superblocks(&**device).await?;
            format_member::<V>(device, &format).await?;
        }
        let config = member_open_config(config, devices.len(), known.swap_bytes);
        let (volume, region) = self.open_member(device, pool, (&config, &format)).await?;
        prepare(&volume);
        // From here on no put is stored in its region, which may still work.
        let retired = self.retire(index);
        self.delete_swapped(devices, index, pool).await?;
        if !is_there && told.is_empty() {
            return Err(OpenError::NotCounted);
        }
        // From the first count on the next opening leaves the lost device out: a put that its region took after an error here would be gone.
        retired.keep();
        if !is_there {
            for (other, superblock) in &told {
                let generation = superblock.generation + 1;
                // What its region had is given up, too.
                let swaps = superblock.swaps.without(index);
                let counted = SpanSuperblock { replacements, generation, swaps, ..*superblock };
                if !bug_injection::is_injected(InjectedBug::SpanForgetReplacement) {
                    write_superblock(&*devices[*other], &counted).await?;
                }
            }
            let place = DeviceOfVolume { index: index as u16, ..known.device };
            let swaps = self.notes_of_replaced(index);
            // A move to the lost device goes on copying to this one until it notices.
            let left_over = self.shared().map.get().0.left_over[index];
            let superblock =
                SpanSuperblock { device: place, generation: 0, replacements, swaps, left_over, ..known };
            write_superblock(&**device, &superblock).await?;
        }
        let mut swap = None;
        if let Some((swaps, region)) = self.swaps().zip(region) {
            swaps.forget_guest(index);
            swap = recover_swaps(swaps, &known, index, Ok(region));
            self.merge_into(&volume, (devices, given), index, pool).await;
            swaps.set_notes(index, self.notes_of_replaced(index));
        }
        self.set_member(index, Member::new(given, replacements[index], &config, (Ok(volume), swap)));
        Ok(())
    }

    /// Gives a core's handle the volume on the device `given`, which was replaced. `device` is the core's view of the new one.
    pub fn renew_engine(
        &self,
        engine: &SpannedEngine<V::Engine>,
        given: usize,
        (core, device, pool): (usize, &Rc<dyn Device>, &BufferPool),
    ) {
        let (members, index) = (self.all_members(), self.index_of(given));
        engine.set_member(index, self.member_engine(index, &members[index], (core, device, pool)));
    }
}
