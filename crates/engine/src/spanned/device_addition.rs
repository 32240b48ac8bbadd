//! Online expansion: adds a device, at first without partitions, to an open volume on several.
//!
//! ```text
//!   volume formatted on the new device ─▶ superblock on it ─▶ those of the others count it ─▶ member ─▶ handles of the cores ─▶ partitions move to it
//!            └ crash: as before              └ crash: the new device is one of the volume if it is given with the others
//! ```
//! A call that did not record the number of devices on all of the others can be repeated: with the same device, which keeps its superblock meanwhile, since the next opening may need it; or with another
//! one, which replaces it.
//! In: a device without data. Out: one more device, at first without partitions; [`rebalancing`](super::rebalancing) begins when all cores have handles on it. Invariant: until a
//! partition has moved to it nothing depends on the new device.
//! Tested in `tests/spanned_growth.rs`.

use super::devices::{replacements_of, rewrite_superblock};
use super::engine::SpannedEngine;
use super::partition_map::SPAN_DEVICES_MAX;
use super::partition_set::PartitionSet;
use super::superblock::SpanSuperblock;
use super::swap_notes::SwapNotes;
use super::volume::{Member, SpannedVolume, format_member, member_config, member_open_config};
use crate::common::superblock::DeviceOfVolume;
use crate::common::superblock_io::{erase_superblocks, read_superblock, write_superblock};
use crate::{FormatConfig, HashKind, OpenConfig, OpenError, Volume};
use octokv_base::BufferPool;
use octokv_device::Device;
use std::rc::Rc;

impl<V: Volume> SpannedVolume<V> {
    /// Adds the last device of `devices` to the open volume, and formats it. The devices before it are those of the volume, in the order in which it was opened. `prepare` is called
    /// with the new device's volume before that serves. Each core's handle then gets the device by [`SpannedVolume::extend_engine`].
    ///
    /// # Errors
    /// - The new device is too small, or fails.
    /// - [`OpenError::OtherDeviceAbsent`], [`OpenError::CoreLacksDevice`], [`OpenError::DeviceCount`].
    /// - [`OpenError::OtherFormat`], [`OpenError::SpanHash`]: the configured format differs from that of the other devices.
    ///
    /// The open volume is unchanged. With [`OpenError::AdditionUnfinished`] the next opening may need the new device; the call may be repeated.
    pub async fn add(
        &self,
        devices: &[Rc<dyn Device>],
        pool: &BufferPool,
        (config, format): (&OpenConfig, &FormatConfig),
        prepare: impl FnOnce(&V),
    ) -> Result<(), OpenError> {
        if format.hash != HashKind::Xxh3 {
            return Err(OpenError::SpanHash);
        }
        let _structure = self.shared().structure.exclude().await;
        let _notes = self.shared().exclude_notes().await;
        let (known, others) = (self.superblock(), self.all_members());
        let (index, count) = (others.len(), others.len() + 1);
        assert_eq!(devices.len(), count, "those of the volume and a new one");
        if count > SPAN_DEVICES_MAX {
            return Err(OpenError::DeviceCount { have: count, most: SPAN_DEVICES_MAX });
        }
        if let Some(absent) = others.iter().position(|member| !member.serves(&devices[member.given])) {
            return Err(OpenError::OtherDeviceAbsent { index: absent as u16 });
        }
        if !self.shared().map.all_cores_have(index) {
            return Err(OpenError::CoreLacksDevice { index: index as u16 - 1 });
        }
        let mut told = vec![known];
        for (index, other) in others.iter().enumerate() {
            let read = read_superblock::<SpanSuperblock>(&*devices[other.given]).await;
            told.push(read.map_err(|_| OpenError::OtherDeviceAbsent { index: index as u16 })?.0);
        }
        let device = &devices[index];
        let place = DeviceOfVolume { index: index as u16, count: count as u16 };
        let known = SpanSuperblock { device: place, swaps: SwapNotes::default(), ..known };
        let mut replacements = replacements_of(told.iter());
        let own = match read_superblock::<SpanSuperblock>(&**device).await {
            Ok((superblock, _)) => Some(superblock),
            Err(OpenError::Superblock(_)) => None,
            Err(error) => return Err(error),
        };
        // The superblock of an earlier call that was not finished: the next opening may need it.
        let unfinished = own.filter(|own| {
            let is_current = own.replacements[index] >= replacements[index];
            own.volume_id == known.volume_id && own.device == place && is_current
        });
        match unfinished {
            Some(own) => replacements[index] = own.replacements[index],
            None => {
                if told.iter().any(|other| usize::from(other.device.count) == count) {
                    // That call was with another device, whose place this one takes.
                    let replaced = replacements[index].checked_add(1);
                    replacements[index] =
                        replaced.ok_or(OpenError::ReplacementsMax { index: index as u16 })?;
                }
                erase_superblocks(&**device).await?;
            }
        }
        let known = SpanSuperblock { replacements, ..known };
        let format = member_config(format, &known, index, replacements[index]);
        format_member::<V>(device, &format).await?;
        let config = member_open_config(config, count, known.swap_bytes);
        let (volume, region) = self.open_member(device, pool, (&config, &format)).await?;
        prepare(&volume);
        let generation = unfinished.map_or(0, |own| own.generation + 1);
        write_superblock(&**device, &SpanSuperblock { generation, ..known }).await?;
        for (index, other) in others.iter().enumerate() {
            let recorded = rewrite_superblock(&*devices[other.given], |superblock| {
                superblock.device.count = count as u16;
                superblock.replacements = replacements;
            });
            recorded.await.map_err(|_| OpenError::AdditionUnfinished { index: index as u16 })?;
        }
        let serving = (Ok(volume), region.map(|opened| opened.volume));
        self.push_member(Member::new(index, replacements[index], &config, serving));
        self.shared().map.publish(|state| state.left_over.push(PartitionSet::default()));
        Ok(())
    }

    /// Gives a core's handle the device that was added last. `device` is the core's view of it.
    pub fn extend_engine(
        &self,
        engine: &SpannedEngine<V::Engine>,
        (core, device, pool): (usize, &Rc<dyn Device>, &BufferPool),
    ) {
        let members = self.all_members();
        let index = members.len() - 1;
        engine.set_member(index, self.member_engine(index, &members[index], (core, device, pool)));
    }
}
