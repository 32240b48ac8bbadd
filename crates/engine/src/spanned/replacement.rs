//! The replacement of a lost device of several by one that begins empty, while the others are served.
//!
//! ```text
//!   volume formatted on the new device ─▶ replacements counted on the others ─▶ superblock on the new device ─▶ members ─▶ handles of the cores
//!            └ crash: as before                  └ crash: neither device is one of the volume, until it is replaced again
//! ```
//! In: the place of a device whose keys the operator gives up, and a device without data. Out: its keys are found missing, and can be stored. Invariants: from the first count on the lost
//! device is refused wherever one of the others is given with it, so that what it holds is never mixed with what came after; the others go on meanwhile, and an iterator that had begun fails at its next call.
//! Tested in `tests/spanned_replacement.rs`, and by the scenario `devices` of the simulator.

use super::devices::replacements_of;
use super::engine::SpannedEngine;
use super::superblock::SpanSuperblock;
use super::volume::{Member, SpannedVolume, member_config, member_device, member_open_config};
use crate::bug_injection::{self, InjectedBug};
use crate::common::superblock::DeviceOfVolume;
use crate::common::superblock_io::{erase_superblocks, read_superblock, write_superblock};
use crate::{FormatConfig, OpenConfig, OpenError, Volume, VolumeInfo};
use octokv_base::BufferPool;
use octokv_device::Device;
use std::rc::Rc;

impl<V: Volume> SpannedVolume<V> {
    /// Puts an empty volume on the device `devices[given]` in the place of one that is lost. `devices` are in the order with which the volume was opened;
    /// `prepare` gets the new volume before it is served. Handles get it by [`SpannedVolume::renew_engine`].
    ///
    /// # Errors
    /// The new device is too small or fails; its volume would differ from the others ([`OpenError::OtherFormat`]); no other device could be told; [`OpenError::ReplacementsMax`]. What is
    /// served has not changed, but the device that was lost may be refused from now on.
    pub async fn replace(
        &self,
        (devices, given): (&[Rc<dyn Device>], usize),
        pool: &BufferPool,
        (config, format): (&OpenConfig, &FormatConfig),
        prepare: impl FnOnce(&V),
    ) -> Result<(), OpenError> {
        let (members, known, device) = (self.all_members(), self.superblock(), &devices[given]);
        let index = members.iter().position(|member| member.given == given).expect("a device of the volume");
        let others = || members.iter().filter(|member| member.given != given && member.volume.is_ok());
        // More is known of a replacement that did not come to its end.
        let mut told = Vec::new();
        for other in others() {
            if let Ok((superblock, _)) = read_superblock::<SpanSuperblock>(&*devices[other.given]).await {
                told.push((&devices[other.given], superblock));
            }
        }
        let mut replacements = replacements_of(told.iter().map(|(_, superblock)| superblock).chain([&known]));
        let count = replacements[index].checked_add(1);
        replacements[index] = count.ok_or(OpenError::ReplacementsMax { index: index as u16 })?;
        erase_superblocks(&**device).await?;
        let format = member_config(format, &known, index, replacements[index]);
        V::format(&[member_device(device)], &format).await?;
        let config = member_open_config(config, members.len());
        let volume = V::open(&[member_device(device)], pool, config, &format).await?;
        let limits = |info: VolumeInfo| (info.value_bytes_max, info.record_layout, info.has_iterators);
        if limits(volume.info()) != limits(self.info()) {
            return Err(OpenError::OtherFormat);
        }
        prepare(&volume);
        let mut outcome = Err(None);
        for (other, superblock) in &told {
            let generation = superblock.generation + 1;
            let counted = SpanSuperblock { replacements, generation, ..*superblock };
            let written = match bug_injection::is_injected(InjectedBug::SpanForgetReplacement) {
                false => write_superblock(&***other, &counted).await,
                true => Ok(()),
            };
            // One that fails now gets the count when the volume is opened again.
            match written {
                Ok(()) => outcome = Ok(()),
                Err(error) => outcome = outcome.map_err(|_: Option<OpenError>| Some(error.into())),
            }
        }
        outcome.map_err(|error| error.unwrap_or(OpenError::NotSpanned))?;
        let place = DeviceOfVolume { index: index as u16, ..known.device };
        let superblock = SpanSuperblock { device: place, generation: 0, replacements, ..known };
        write_superblock(&**device, &superblock).await?;
        self.set_member(index, Member { given, replacements: replacements[index], volume: Ok(volume) });
        Ok(())
    }

    /// Gives a core's handle the volume on the device `given`, which was replaced. `device` is the core's view of the new one.
    pub fn renew_engine(
        &self,
        engine: &SpannedEngine<V::Engine>,
        given: usize,
        (core, device, pool): (usize, &Rc<dyn Device>, &BufferPool),
    ) {
        let members = self.all_members();
        let index = members.iter().position(|member| member.given == given).expect("a device of the volume");
        engine.set_member(index, self.member_engine(index, &members[index], (core, device, pool)));
    }
}
