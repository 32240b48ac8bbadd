//! The engine of a simulated node, with the sizes of its volume.
//!
//! In: random numbers, by `TreePlan::draw` and `LogPlan::draw`. Out: the format of a volume, the volume opened.

use crate::log_plan::LogPlan;
use crate::tree_plan::TreePlan;
use octokv_base::BufferPool;
use octokv_device::Device;
use octokv_engine::log::settings::LogSettings;
use octokv_engine::lsm::settings::TreeSettings;
use octokv_engine::{
    AnyVolume, CachedVolume, EngineKind, FormatConfig, OpenConfig, OpenError, Volume, log, lsm,
};
use std::rc::Rc;

/// The engine of a node.
#[derive(Clone, Copy, Debug)]
pub enum EnginePlan {
    /// The hash engine.
    Hash,
    /// The ordered engine.
    Tree(TreePlan),
    /// The log engine.
    Log(LogPlan),
    /// An engine with the settings that a node gives it.
    AsConfigured(EngineKind),
}

impl EnginePlan {
    /// Whether a damaged block may have more than one key, and a key may stay lost when the block is not in use any more.
    pub fn shares_blocks(&self) -> bool {
        !matches!(self, EnginePlan::Hash | EnginePlan::AsConfigured(EngineKind::Hash))
    }

    /// Mean number of completed commands between pieces of background work that nothing needs; `None` without any.
    pub fn work_interval(&self) -> Option<u64> {
        match self {
            EnginePlan::Hash | EnginePlan::AsConfigured(_) => None,
            EnginePlan::Tree(tree) => Some(tree.work_interval),
            EnginePlan::Log(log) => Some(log.work_interval),
        }
    }

    /// The format of its volume; `common` has what all engines have.
    pub fn format(&self, common: FormatConfig) -> FormatConfig {
        match self {
            EnginePlan::Hash => FormatConfig { engine: EngineKind::Hash, ..common },
            EnginePlan::AsConfigured(engine) => {
                FormatConfig { engine: *engine, inline_bytes_max: 300, partitions: 2, ..common }
            }
            EnginePlan::Tree(tree) => {
                FormatConfig { engine: EngineKind::Lsm, inline_bytes_max: tree.inline_bytes_max, ..common }
            }
            EnginePlan::Log(log) => FormatConfig {
                engine: EngineKind::Log,
                partitions: log.partitions,
                chunk_bytes: Some(log.chunk_bytes),
                ..common
            },
        }
    }

    /// Opens its volume.
    ///
    /// # Errors
    /// Those of [`Volume::open`].
    pub async fn open(
        &self,
        devices: &[Rc<dyn Device>],
        pool: &BufferPool,
        config: OpenConfig,
        format: &FormatConfig,
    ) -> Result<AnyVolume, OpenError> {
        match self {
            EnginePlan::Hash | EnginePlan::AsConfigured(_) => {
                AnyVolume::open(devices, pool, config, format).await
            }
            EnginePlan::Tree(tree) => {
                let adjust = |settings: &mut TreeSettings| tree.adjust(settings);
                lsm::open_with(&devices[0], pool, config, format, adjust).await.map(AnyVolume::Lsm)
            }
            EnginePlan::Log(log) => {
                let adjust = |settings: &mut LogSettings| log.adjust(settings);
                let cache_bytes = config.cache_bytes;
                let volume = log::open::open_with(&devices[0], pool, config, format, adjust).await?;
                Ok(match cache_bytes {
                    0 => AnyVolume::Log(volume),
                    bytes => AnyVolume::CachedLog(CachedVolume::new(volume, bytes)),
                })
            }
        }
    }
}
