//! The merge of several cursors: their entries in one order, in both directions.
//!
//! ```text
//!                 seek               next, prev
//!   no entry ──────────▶ at an entry ───────────▶ …            any operation ──Corrupt──▶ damaged ──next or prev──▶ …
//! ```
//! In: cursors, the newest first: of one key, each has older entries than those before it. Out: all their entries. The source of the
//! current entry is the winner of a tournament, whose tree keeps the winner of each game: a step repeats the games of one source, at most
//! log2(n) rounded up. A change of direction seeks in all sources, as a seek does, concurrently.
//!
//! Damage: a source's [`EngineError::Corrupt`] is passed on once, and the merge is at no entry; the next step in the same direction goes
//! on behind the part that cannot be read. Until its source has gone on by one entry, what older sources yield may be
//! outdated: an entry that replaced it may have been in that part ([`MergingCursor::may_be_outdated`]). Any other failure ends the
//! merge, until a seek.
//!
//! An operation whose future was dropped leaves the merge at no entry, until a seek.
//! Invariant: all sources are at their first entry from the current one on, in the direction of the merge. Tested in `merge_tests.rs`.

use super::cursor::EntryCursor;
use super::entry::{Position, TreeEntry};
use crate::EngineError;
use futures_util::future::join_all;
use std::cmp::Ordering;

/// The direction of the last operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MergeDirection {
    /// To greater positions.
    Forward,
    /// To smaller positions.
    Backward,
}

/// A cursor over the entries of several.
pub struct MergingCursor<C> {
    sources: Vec<MergeSource<C>>,
    /// The winners: at 1 that of all, at `i` that of `2i` and `2i + 1`, at `n + i` source `i`. 0 is not used.
    winners: Vec<usize>,
    state: MergeState,
    /// The sources with `is_behind_damage`.
    behind_damage: usize,
    comparisons: u64,
    /// The key from which a change of direction seeks.
    key: Vec<u8>,
}

struct MergeSource<C> {
    cursor: C,
    /// What it failed with, until that is passed on.
    damage: Option<EngineError>,
    /// It met damage and has not gone on.
    is_at_damage: bool,
    /// It met damage, and the entry to which it went on is its current one, or still to come.
    is_behind_damage: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MergeState {
    NoEntry,
    Merged(MergeDirection),
    Damaged(MergeDirection),
}

use MergeDirection::{Backward, Forward};

impl<C: EntryCursor> MergingCursor<C> {
    /// A merge at no entry. The newest source comes first.
    pub fn new(sources: Vec<C>) -> MergingCursor<C> {
        let count = sources.len();
        let new_source =
            |cursor| MergeSource { cursor, damage: None, is_at_damage: false, is_behind_damage: false };
        MergingCursor {
            sources: sources.into_iter().map(new_source).collect(),
            winners: (0..2 * count).map(|place| place.saturating_sub(count)).collect(),
            state: MergeState::NoEntry,
            behind_damage: 0,
            comparisons: 0,
            key: Vec::new(),
        }
    }

    /// Its sources, in their order.
    pub fn sources(&self) -> impl ExactSizeIterator<Item = &C> {
        self.sources.iter().map(|source| &source.cursor)
    }

    /// The source of the current entry.
    pub fn source_index(&self) -> Option<usize> {
        self.entry().map(|_| self.winners[1])
    }

    /// Whether a newer entry of the current entry's key may have been in a part that could not be read: a newer source met one, and
    /// has not gone on by an entry since, or the entry's own source did, forward. (Backward, the entry behind a part is the newer one.)
    /// Backward, a part that is met later may have a newer entry, too.
    pub fn may_be_outdated(&self) -> bool {
        let (MergeState::Merged(direction), 1..) = (self.state, self.behind_damage) else { return false };
        let winner = self.winners[1];
        let newer = self.sources[..winner].iter().any(|source| source.is_behind_damage);
        newer || (direction == Forward && self.sources[winner].is_behind_damage)
    }

    /// How often keys were compared since it was made.
    pub fn comparisons(&self) -> u64 {
        self.comparisons
    }

    /// Of two sources, the one whose entry comes first in a direction; a source without an entry comes last.
    fn first_of(&mut self, one: usize, other: usize, direction: MergeDirection) -> usize {
        let [of_one, of_other] = [one, other].map(|source| self.sources[source].cursor.position());
        let (Some(of_one), Some(of_other)) = (of_one, of_other) else {
            return if of_one.is_some() { one } else { other };
        };
        // Positions are distinct, unless a journal that was replayed twice is in two sources.
        let order = of_one.cmp(&of_other).then(one.cmp(&other));
        self.comparisons += 1;
        match (order, direction) {
            (Ordering::Greater, Forward) | (Ordering::Less, Backward) => other,
            (Ordering::Less | Ordering::Equal, Forward) | (Ordering::Greater | Ordering::Equal, Backward) => {
                one
            }
        }
    }

    fn replay_game(&mut self, game: usize, direction: MergeDirection) {
        self.winners[game] = self.first_of(self.winners[2 * game], self.winners[2 * game + 1], direction);
    }

    fn replay_all(&mut self, direction: MergeDirection) {
        for game in (1..self.sources.len()).rev() {
            self.replay_game(game, direction);
        }
    }

    /// Repeats the games of one source.
    fn replay_of(&mut self, source: usize, direction: MergeDirection) {
        let mut game = (self.sources.len() + source) / 2;
        while game > 0 {
            self.replay_game(game, direction);
            game /= 2;
        }
    }

    /// Seeks in all sources.
    async fn seek_all(
        &mut self,
        position: Option<Position<'_>>,
        direction: MergeDirection,
    ) -> Result<(), EngineError> {
        self.state = MergeState::NoEntry;
        let seeks = self.sources.iter_mut().map(async |source| match (direction, position) {
            (Forward, Some(position)) => source.cursor.seek(position).await,
            (Forward, None) => source.cursor.seek(Position::START).await,
            (Backward, position) => source.cursor.seek_before(position).await,
        });
        let outcomes = join_all(seeks).await;
        self.behind_damage = 0;
        for (source, outcome) in self.sources.iter_mut().zip(outcomes) {
            (source.damage, source.is_at_damage, source.is_behind_damage) = (None, false, false);
            match outcome {
                Err(error @ EngineError::Corrupt { .. }) => source.damage = Some(error),
                other => other?,
            }
        }
        self.pass_damage_on(direction)?;
        self.replay_all(direction);
        self.state = MergeState::Merged(direction);
        Ok(())
    }

    /// Fails with the damage that one of the sources met, if that was not passed on.
    fn pass_damage_on(&mut self, direction: MergeDirection) -> Result<(), EngineError> {
        for index in 0..self.sources.len() {
            if let Some(error) = self.sources[index].damage.take() {
                return Err(self.damaged(index, direction, error));
            }
        }
        Ok(())
    }

    /// The source met damage, which is passed on.
    fn damaged(&mut self, source: usize, direction: MergeDirection, error: EngineError) -> EngineError {
        let source = &mut self.sources[source];
        self.behind_damage += usize::from(!source.is_behind_damage);
        (source.is_at_damage, source.is_behind_damage) = (true, true);
        self.state = MergeState::Damaged(direction);
        error
    }

    /// Moves one source by one entry.
    async fn step_source(&mut self, index: usize, direction: MergeDirection) -> Result<(), EngineError> {
        let source = &mut self.sources[index];
        let stepped = match direction {
            Forward => source.cursor.next().await,
            Backward => source.cursor.prev().await,
        };
        match stepped {
            Err(error @ EngineError::Corrupt { .. }) => return Err(self.damaged(index, direction, error)),
            other => other?,
        }
        let source = &mut self.sources[index];
        // From damage, it goes on to the entry that has to be left.
        if !std::mem::take(&mut source.is_at_damage) && std::mem::take(&mut source.is_behind_damage) {
            self.behind_damage -= 1;
        }
        Ok(())
    }

    /// Moves by one entry in the direction of the last operation.
    async fn step(&mut self, direction: MergeDirection) -> Result<(), EngineError> {
        match std::mem::replace(&mut self.state, MergeState::NoEntry) {
            MergeState::Merged(_) => {
                let winner = self.winners[1];
                self.step_source(winner, direction).await?;
                self.replay_of(winner, direction);
            }
            MergeState::Damaged(_) => {
                self.pass_damage_on(direction)?;
                for index in 0..self.sources.len() {
                    if self.sources[index].is_at_damage {
                        self.step_source(index, direction).await?;
                    }
                }
                self.replay_all(direction);
            }
            MergeState::NoEntry => unreachable!("the caller has checked the state"),
        }
        self.state = MergeState::Merged(direction);
        Ok(())
    }

    /// Moves by one entry, also against the direction of the last operation.
    async fn step_or_turn(&mut self, direction: MergeDirection) -> Result<(), EngineError> {
        match self.state {
            MergeState::Damaged(before) => {
                assert_eq!(before, direction, "damage is passed in the direction in which it was met");
                return self.step(direction).await;
            }
            MergeState::Merged(before) if before == direction => {
                assert!(self.position().is_some(), "the cursor is at no entry");
                return self.step(direction).await;
            }
            MergeState::Merged(_) | MergeState::NoEntry => {}
        }
        let mut key = std::mem::take(&mut self.key);
        key.clear();
        let at = self.entry().expect("the cursor is at no entry");
        key.extend_from_slice(at.key);
        let sequence = match direction {
            // The next older number: sequence numbers are from 1.
            Forward => at.sequence - 1,
            Backward => at.sequence,
        };
        let outcome = self.seek_all(Some(Position { key: &key, sequence }), direction).await;
        self.key = key;
        outcome
    }
}

impl<C: EntryCursor> EntryCursor for MergingCursor<C> {
    fn entry(&self) -> Option<TreeEntry<'_>> {
        match self.state {
            MergeState::Merged(_) => self.sources.get(*self.winners.get(1)?)?.cursor.entry(),
            MergeState::NoEntry | MergeState::Damaged(_) => None,
        }
    }

    fn position(&self) -> Option<Position<'_>> {
        match self.state {
            MergeState::Merged(_) => self.sources.get(*self.winners.get(1)?)?.cursor.position(),
            MergeState::NoEntry | MergeState::Damaged(_) => None,
        }
    }

    async fn seek(&mut self, position: Position<'_>) -> Result<(), EngineError> {
        self.seek_all(Some(position), Forward).await
    }

    async fn seek_before(&mut self, position: Option<Position<'_>>) -> Result<(), EngineError> {
        self.seek_all(position, Backward).await
    }

    async fn next(&mut self) -> Result<(), EngineError> {
        self.step_or_turn(Forward).await
    }

    async fn prev(&mut self) -> Result<(), EngineError> {
        self.step_or_turn(Backward).await
    }
}
