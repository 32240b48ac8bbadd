//! Background work of an engine that nothing needs: flushes, compactions, splits, checkpoints.
//!
//! In: the engine of a plan, random numbers. Out: a piece of work, which runs on a handle of the engine to its end.

use crate::draw::pick;
use crate::engine_plan::EnginePlan;
use octokv_base::Prng;
use octokv_engine::log::handle::LogEngine;
use octokv_engine::log::log_place::LogKind;
use octokv_engine::lsm::LsmEngine;
use octokv_engine::{AnyEngine, Engine};

/// A piece of work.
#[derive(Clone, Copy, Debug)]
pub enum EngineWork {
    /// Of the ordered engine.
    Tree(TreeWork),
    /// Of the log engine.
    Log(LogWork),
}

/// Work of the ordered engine.
#[derive(Clone, Copy, Debug)]
pub enum TreeWork {
    /// A flush of all memtables.
    Flush,
    /// One compaction.
    Compact {
        /// Whether also one with little gain.
        wants_space: bool,
    },
    /// A checkpoint.
    Checkpoint,
}

/// Work of the log engine.
#[derive(Clone, Copy, Debug)]
pub enum LogWork {
    /// Some rounds of one log of each store, which overlap.
    Compact(LogKind, u32),
    /// Rounds as long as there is garbage.
    CompactAll,
    /// A split in each store, if that is due.
    Split,
    /// Markers.
    MarkDurable,
    /// A checkpoint.
    Checkpoint,
}

impl EngineWork {
    /// Draws a piece of work of an engine; `None` if it has none.
    pub fn draw(random: &mut Prng, engine: &EnginePlan) -> Option<EngineWork> {
        match engine {
            EnginePlan::Hash | EnginePlan::AsConfigured(_) => None,
            EnginePlan::Tree(_) => Some(EngineWork::Tree(match random.below(6) {
                0..2 => TreeWork::Flush,
                2..4 => TreeWork::Compact { wants_space: false },
                4 => TreeWork::Compact { wants_space: true },
                _ => TreeWork::Checkpoint,
            })),
            EnginePlan::Log(_) => Some(EngineWork::Log(match random.below(12) {
                0..3 => LogWork::Compact(LogKind::Keys, pick(random, &[1, 4])),
                3..7 => LogWork::Compact(LogKind::Values, pick(random, &[1, 4])),
                7 => LogWork::CompactAll,
                8 | 9 => LogWork::Split,
                10 => LogWork::MarkDurable,
                _ => LogWork::Checkpoint,
            })),
        }
    }

    /// Does it. A failure is the device's, or there is no space: operations meet it, too.
    pub async fn run(self, engine: &AnyEngine) {
        match (self, engine) {
            (EngineWork::Tree(work), AnyEngine::Lsm(engine)) => work.run(engine).await,
            (EngineWork::Log(work), AnyEngine::Log(engine)) => work.run(engine).await,
            (EngineWork::Log(work), AnyEngine::CachedLog(engine)) => work.run(engine.engine()).await,
            (EngineWork::Tree(_) | EngineWork::Log(_), _) => panic!("work of another engine"),
        }
    }
}

impl TreeWork {
    async fn run(self, engine: &LsmEngine) {
        let _ = match self {
            TreeWork::Flush => engine.flush_memtables().await,
            TreeWork::Compact { wants_space } => engine.compact_once(wants_space).await.map(drop),
            TreeWork::Checkpoint => engine.checkpoint().await,
        };
    }
}

impl LogWork {
    async fn run(self, engine: &LogEngine) {
        let _ = match self {
            LogWork::Compact(log, rounds) => engine.compact_rounds(log, rounds).await.map(drop),
            LogWork::CompactAll => engine.compact_all().await,
            LogWork::Split => engine.split_once().await.map(drop),
            LogWork::MarkDurable => engine.mark_durable().await,
            LogWork::Checkpoint => engine.checkpoint().await,
        };
    }
}
