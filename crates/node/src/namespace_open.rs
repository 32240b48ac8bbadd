//! What is under a namespace: a device opened once for the process, and the volume on it.
//!
//! In: settings of a namespace. Out: a [`Held`] namespace, open and recovered, of which each core makes its own
//! [`Store`]. Runs on the caller's thread, with a device channel of its own.
//! Invariants: nothing is written to a device that is not ours, unless it is to be given up; an open file is
//! locked until nothing names it.

use crate::block_backend::{BlockVolume, Blocks};
use crate::config::{Content, DeviceSettings, Existing, NamespaceSettings};
use crate::fair_yield::Pace;
use crate::kv_backend::Performer;
use crate::namespace_table::Store;
use crate::node::StartError;
use octokv_base::{Buffer, Lba, Pool};
use octokv_device::ssd_model::{Drive, Model, SharedModel};
use octokv_device::{Device, DeviceError, FileDevice, Geometry, Memory, MemoryDevice, NandDevice};
use octokv_engine::hash::superblock::{
    self, NotOurs, SUPERBLOCK_BYTES, SUPERBLOCK_STRIDE_BYTES, SUPERBLOCKS,
};
use octokv_engine::hash::{self, HashEngine, OpenSettings, Report, Volume};
use octokv_engine::{Durability, Fault};
use octokv_nvmf::{NamespaceInfo, NamespaceKind};
use octokv_runtime::{Busy, Channel, DeviceDriver, Doorbell, Handle, Media, block_on, device_queue, kernel};
use octokv_sys::file::open_device;
use octokv_sys::process::{available_memory_bytes, random_u64};
use parking_lot::Mutex;
use std::io;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// The part of a file that a format writes, in bytes.
const FORMATTED_BYTES: u64 = SUPERBLOCKS * SUPERBLOCK_STRIDE_BYTES;

/// A device, opened once for the process.
#[derive(Clone)]
struct Backing {
    store: Storage,
    /// The drive whose times its answers take.
    drive: Option<SharedModel>,
}

#[derive(Clone)]
enum Storage {
    Memory(Arc<Memory>),
    File(Media),
}

impl Backing {
    /// Opens it, and says whether it may be formatted: see [`Storage::open`], and memory that plays a drive.
    fn open(settings: &DeviceSettings, drive: Option<&Drive>) -> Result<(Backing, bool), StartError> {
        let (store, new) = Storage::open(settings)?;
        let Some(drive) = drive else { return Ok((Backing { store, drive: None }, new)) };
        let (bytes, block_bytes) = store.size();
        if bytes > drive.capacity_bytes {
            let why = format!(
                "{bytes} bytes are more than a {} has: {} bytes",
                drive.product, drive.capacity_bytes
            );
            return Err(StartError::Setting { name: "size", why });
        }
        let new = new || matches!(store, Storage::Memory(_));
        let model = Model::new(*drive, block_bytes);
        let model = if new { model } else { model.holding_old() };
        tracing::info!(device = store.name(), drive = drive.product, "answers take a drive's time");
        Ok((Backing { store, drive: Some(Arc::new(Mutex::new(model))) }, new))
    }

    fn name(&self) -> String {
        self.store.name()
    }

    /// One core's view of the device.
    fn view(&self, handle: &Handle) -> io::Result<Rc<dyn Device>> {
        let device = self.store.view(&handle.channel())?;
        Ok(match &self.drive {
            None => device,
            Some(model) => Rc::new(NandDevice::new(device, Arc::clone(model), handle.clone())),
        })
    }
}

impl Storage {
    /// Opens it, and says whether it is a file that was made for us and may be formatted: just now, or by a
    /// start that was killed before it had formatted it.
    fn open(settings: &DeviceSettings) -> Result<(Storage, bool), StartError> {
        match settings {
            DeviceSettings::Memory { bytes, block_bytes } => {
                // It is touched as it fills: more than there is would end this process, or another.
                if let Some(available) = available_memory_bytes().filter(|available| bytes > available) {
                    let why =
                        format!("{bytes} bytes of memory are more than the {available} that are available");
                    return Err(StartError::Setting { name: "size", why });
                }
                let memory = Memory::new(*bytes, *block_bytes).map_err(StartError::System)?;
                Ok((Storage::Memory(memory), false))
            }
            DeviceSettings::File { path, create_bytes } => {
                let name = path.display().to_string();
                let file = open_device(path, *create_bytes, true)
                    .map_err(|error| StartError::Device { name, error })?;
                let new = file.created()
                    || (create_bytes.is_some()
                        && !file.is_block_device()
                        && !file.holds_data_from(FORMATTED_BYTES));
                Ok((Storage::File(Media::file(file)), new))
            }
        }
    }

    fn name(&self) -> String {
        match self {
            Storage::Memory(_) => "memory".to_owned(),
            Storage::File(media) => media.name.to_string(),
        }
    }

    /// Its size, and that of a block, in bytes.
    fn size(&self) -> (u64, u32) {
        match self {
            Storage::Memory(memory) => (memory.geometry().bytes(), memory.geometry().block_bytes),
            Storage::File(media) => (media.size_bytes, media.block_bytes),
        }
    }

    /// One core's view of the device.
    fn view(&self, channel: &Channel) -> io::Result<Rc<dyn Device>> {
        Ok(match self {
            Storage::Memory(memory) => Rc::new(MemoryDevice::new(Arc::clone(memory))),
            Storage::File(media) => {
                let blocks = media.size_bytes / u64::from(media.block_bytes);
                let geometry = Geometry { block_bytes: media.block_bytes, blocks, volatile: false };
                Rc::new(FileDevice::new(channel.clone(), channel.open(media)?, geometry, self.name()))
            }
        })
    }
}

/// How devices are opened and volumes recovered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Opening {
    pub driver: DeviceDriver,
    pub device_depth: usize,
    pub durability: Durability,
    pub cores: usize,
    /// Where a new volume's random numbers come from; `None` asks the system.
    pub seed: Option<u64>,
}

/// What cores share of the contents of a namespace.
#[derive(Clone)]
pub(crate) enum Contents {
    Keys(Arc<Volume>),
    Blocks(Arc<BlockVolume>),
}

/// A namespace that is open.
#[derive(Clone)]
pub(crate) struct Held {
    pub settings: NamespaceSettings,
    pub contents: Contents,
    backing: Backing,
}

/// What a core makes its stores of.
pub(crate) struct CoreParts<'a> {
    pub core: usize,
    pub pool: &'a Pool,
    pub handle: &'a Handle,
}

impl Held {
    /// Opens a namespace, after formatting its device where that is asked for or the file is new.
    pub fn open(settings: &NamespaceSettings, opening: Opening) -> Result<Held, StartError> {
        let (backing, new) = Backing::open(&settings.device, settings.nand)?;
        let handle = own_handle(opening.driver, opening.device_depth)?;
        let device = backing.view(&handle).map_err(StartError::System)?;
        let contents = match &settings.content {
            Content::KeyValue { .. } => {
                Contents::Keys(open_volume(settings, opening, (&handle, &device), new)?)
            }
            Content::Blocks { block_bytes } => {
                make_free(settings, &handle, &*device)?;
                let volume = BlockVolume::new(*block_bytes, device.geometry().bytes());
                if volume.size_bytes() == 0 {
                    let why = format!("{} holds not one block of {block_bytes} bytes", backing.name());
                    return Err(StartError::Setting { name: "size", why });
                }
                Contents::Blocks(volume)
            }
        };
        Ok(Held { settings: settings.clone(), contents, backing })
    }

    /// What the device is called.
    pub fn name(&self) -> String {
        self.backing.name()
    }

    /// The longest value of a Key Value namespace.
    pub fn value_bytes_max(&self) -> Option<usize> {
        match &self.contents {
            Contents::Keys(volume) => Some(volume.value_bytes_max()),
            Contents::Blocks(_) => None,
        }
    }

    /// The namespace as hosts see it.
    pub fn info(&self, key_bytes_max: u16) -> NamespaceInfo {
        let NamespaceSettings { id, ana_group, identity, .. } = self.settings;
        match &self.contents {
            Contents::Keys(volume) => NamespaceInfo { id, ana_group, ..namespace_of(volume, key_bytes_max) },
            Contents::Blocks(volume) => NamespaceInfo {
                id,
                nguid: nguid(2, identity),
                size_bytes: volume.size_bytes(),
                used_bytes: Arc::new(AtomicU64::new(volume.size_bytes())),
                kind: NamespaceKind::Block { block_bytes: volume.block_bytes() },
                ana_group,
            },
        }
    }

    /// One core's store of it.
    pub fn store(&self, parts: &CoreParts<'_>) -> io::Result<Store<HashEngine>> {
        let CoreParts { core, pool, handle } = *parts;
        let device = self.backing.view(handle)?;
        let name = Rc::from(self.name());
        let (pool, handle) = (pool.clone(), handle.clone());
        Ok(match &self.contents {
            Contents::Keys(volume) => {
                let engine = HashEngine::new(Arc::clone(volume), core, device, pool.clone());
                Store::Keys(Rc::new(Performer {
                    engine,
                    pool,
                    handle,
                    device: name,
                    listings: Pace::default(),
                }))
            }
            Contents::Blocks(volume) => {
                Store::Blocks(Blocks { volume: Arc::clone(volume), device, pool, handle, name })
            }
        })
    }

    /// Closes it in order, once no core uses it.
    pub fn close(&self, opening: Opening) -> Result<(), Fault> {
        let no_queue = |_| Fault::ReadOnly;
        let handle = own_handle(opening.driver, opening.device_depth).map_err(no_queue)?;
        let device = self.backing.view(&handle).map_err(|_| Fault::ReadOnly)?;
        match &self.contents {
            Contents::Keys(volume) => {
                let engine = HashEngine::new(Arc::clone(volume), 0, device, Pool::new(1 << 20));
                finish(&handle, engine.checkpoint(true))
            }
            Contents::Blocks(_) => finish(&handle, device.flush()).result.map_err(Fault::Device),
        }
    }
}

/// Devices and timers for the calling thread alone.
fn own_handle(driver: DeviceDriver, depth: usize) -> Result<Handle, StartError> {
    let doorbell = Doorbell::new().map_err(StartError::System)?;
    let (queue, _) = device_queue(driver, depth, &doorbell).map_err(StartError::System)?;
    let handle = Handle::new(doorbell, Channel::new(queue, depth), Busy::real());
    handle.begin_turn(kernel::now());
    Ok(handle)
}

/// Runs a future of the calling thread's devices to its end.
fn finish<T>(handle: &Handle, future: impl Future<Output = T>) -> T {
    let channel = handle.channel();
    block_on(future, || {
        handle.begin_turn(kernel::now());
        channel.poll();
    })
}

/// Opens the volume, after formatting the device where that is asked for or the file is `new`.
fn open_volume(
    settings: &NamespaceSettings,
    opening: Opening,
    (handle, device): (&Handle, &Rc<dyn Device>),
    new: bool,
) -> Result<Arc<Volume>, StartError> {
    let Content::KeyValue { format } = &settings.content else { unreachable!("keys are asked for") };
    let failed = |error| StartError::Volume { name: device.name().to_owned(), error };
    let mut format = *format;
    format.seed = match opening.seed {
        Some(seed) => seed,
        None => random_u64().map_err(StartError::System)?,
    };
    let pool = Pool::new(64 << 20);
    let unwritten = new && finish(handle, is_blank(&**device)).map_err(|error| failed(error.into()))?;
    if settings.existing == Existing::GiveUp || unwritten {
        finish(handle, hash::format(&**device, &format)).map_err(failed)?;
    }
    let open = OpenSettings { durability: opening.durability, cores: opening.cores };
    finish(handle, hash::open(device, &pool, open, &format)).map_err(failed)
}

/// Whether the part that a format writes is all zeros.
async fn is_blank(device: &dyn Device) -> Result<bool, DeviceError> {
    let bytes = FORMATTED_BYTES.min(device.geometry().bytes()) as usize;
    let buffer = device.read(Lba(0), Buffer::zeroed(bytes)).await.into_read()?;
    Ok(buffer.iter().all(|&byte| byte == 0))
}

/// A device that holds a volume of keys is not taken for blocks, unless it is to be given up: then the volume is
/// wiped out, so that nobody takes what is left for one.
fn make_free(settings: &NamespaceSettings, handle: &Handle, device: &dyn Device) -> Result<(), StartError> {
    if settings.existing == Existing::Keep {
        return Ok(());
    }
    let failed =
        |error: DeviceError| StartError::Volume { name: device.name().to_owned(), error: error.into() };
    let held = finish(handle, holds_keys(device)).map_err(failed)?;
    if held && settings.existing == Existing::Check {
        let why = format!(
            "{} holds an octokv volume of keys; it was left as it is (--format gives up what it holds, --keep \
             serves it to hosts as blocks)",
            device.name()
        );
        return Err(StartError::Setting { name: "device", why });
    }
    if held {
        finish(handle, wipe(device)).map_err(failed)?;
    }
    Ok(())
}

async fn holds_keys(device: &dyn Device) -> Result<bool, DeviceError> {
    let bytes = FORMATTED_BYTES.min(device.geometry().bytes()) as usize;
    let buffer = device.read(Lba(0), Buffer::zeroed(bytes)).await.into_read()?;
    let places = (0..SUPERBLOCKS as usize).map(|place| place * SUPERBLOCK_STRIDE_BYTES as usize);
    let found = places.filter_map(|at| buffer.get(at..at + SUPERBLOCK_BYTES));
    let is_ours = |bytes: &[u8]| {
        let bytes = bytes.try_into().expect("as long as a superblock");
        !matches!(superblock::Unchecked(bytes).check(), Err(NotOurs::Foreign | NotOurs::Blank))
    };
    Ok(found.into_iter().any(is_ours))
}

async fn wipe(device: &dyn Device) -> Result<(), DeviceError> {
    let bytes = FORMATTED_BYTES.min(device.geometry().bytes()) as usize;
    device.write(Lba(0), Buffer::zeroed(bytes)).await.result?;
    device.flush().await.result
}

/// A namespace identifier of 16 bytes that is ours, of this kind, with this number.
fn nguid(kind: u8, identity: u64) -> [u8; 16] {
    let mut nguid = [0; 16];
    nguid[..7].copy_from_slice(b"octokv\0");
    nguid[7] = kind;
    nguid[8..].copy_from_slice(&identity.to_be_bytes());
    nguid
}

/// The namespace 1 that hosts see of a volume.
pub fn namespace_of(volume: &Volume, key_bytes_max: u16) -> NamespaceInfo {
    NamespaceInfo {
        id: octokv_base::NamespaceId(1),
        nguid: nguid(1, volume.id()),
        size_bytes: volume.capacity_bytes(),
        used_bytes: volume.used_bytes(),
        kind: NamespaceKind::KeyValue { value_bytes_max: volume.value_bytes_max() as u32, key_bytes_max },
        ana_group: 1,
    }
}

/// Reads and verifies everything on a device; changes nothing. `progress` is told how many of how many
/// keys are done.
pub fn check_device(path: &Path, progress: impl FnMut(u64, u64)) -> Result<Report, StartError> {
    let settings = DeviceSettings::File { path: path.to_owned(), create_bytes: None };
    let (backing, _) = Backing::open(&settings, None)?;
    let handle = own_handle(DeviceDriver::Auto, 64)?;
    let device = backing.view(&handle).map_err(StartError::System)?;
    let pool = Pool::new(64 << 20);
    let failed = |error| StartError::Volume { name: backing.name(), error };
    finish(&handle, hash::check(&*device, &pool, progress)).map_err(failed)
}
