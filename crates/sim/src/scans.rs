//! Scans of clients: iterators that they create, advance, move and end, and the checks of the pairs.
//!
//! ```text
//!   create ─▶ idle ⇄ in use: next, seek        idle ──destroy, end of the session, error that ends it──▶ gone
//! ```
//! In: random choices, and the responses. Out: commands; for each key in the part of its range that a scan has passed, a read in
//! the history at the moment of the creation, so between that command and its response; the first violation.
//!
//! Checks: pairs are in order, within the bounds, behind the iterator's place, and none is missing; a second look at a key shows the
//! same value; some moment between the creation and its response agrees with all values of one scan (`Moment`).

use crate::draw::pick;
use crate::history::{CallId, History};
use octokv_base::{Key, Prng};
use octokv_client::{Command, RemoteIterator};
use octokv_engine::linearizability::{Call, CallRecord, CallResult, KeyState, Observed};
use octokv_wire::iterator::PairList;

/// How clients scan.
#[derive(Clone, Copy, Debug)]
pub struct ScanLoad {
    /// On average one command in so many is of a scan.
    pub one_in: u64,
    /// The most iterators of a session.
    pub open_max: usize,
}

/// The place of an iterator, by the index of a key in the order of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ScanPlace {
    /// The next pair is at this key or behind it, in the direction of the iterator.
    At(usize),
    /// It has given its last pair.
    End,
}

/// The moments, as event numbers, at which all that a scan has shown may have been there at once.
#[derive(Clone, Copy, Debug)]
struct Moment {
    /// It is behind this event.
    after: u64,
    /// It is before this event.
    before: u64,
}

/// One iterator of a session.
pub struct Scan {
    /// Its number among all scans.
    number: u64,
    session: u64,
    /// `None` until it is created.
    iterator: Option<RemoteIterator>,
    created: CallId,
    /// The events between which it was created, unless the segment had ended.
    interval: Option<(u64, u64)>,
    /// The keys of its range, as indices in the order of keys.
    first: usize,
    behind_last: usize,
    reverse: bool,
    keys_only: bool,
    place: ScanPlace,
    /// Whether a pair that cannot be read may be at its place.
    may_have_passed: bool,
    /// Whether blocks of the volume are lost: then an iterator leaves out more than the pair at which it fails.
    lacks_blocks: bool,
    /// What it has shown of each key, by the index in the order of keys.
    seen: Vec<Option<Observed>>,
    moment: Moment,
    limit_bytes: u32,
    is_in_use: bool,
}

/// A command of a scan.
#[derive(Clone, Copy, Debug)]
pub enum ScanStep {
    /// Creates the iterator.
    Create,
    /// Reads at most so many pairs.
    Next {
        /// The most pairs.
        pairs_max: u32,
    },
    /// Moves to a key, by its index in the order of keys.
    Seek {
        /// The key.
        to: usize,
    },
    /// Ends the iterator.
    Destroy,
}

/// The scans of all sessions.
pub struct Scans {
    open: Vec<Scan>,
    last_number: u64,
    /// The keys in their order, as indices of the history.
    order: Vec<usize>,
    /// Pairs received.
    pub pairs: u64,
}

impl Scans {
    /// None, over these keys.
    pub fn new(keys: &[Key]) -> Scans {
        let mut order: Vec<usize> = (0..keys.len()).collect();
        order.sort_by_key(|&key| &keys[key]);
        Scans { open: Vec::new(), last_number: 0, order, pairs: 0 }
    }

    /// The scans of a session end.
    pub fn end_session(&mut self, session: u64) {
        self.open.retain(|scan| scan.session != session);
    }

    /// A scan ends.
    pub fn end(&mut self, number: u64) {
        self.open.retain(|scan| scan.number != number);
    }

    /// Draws a command of a session's scans; `None` if all of them are in use.
    pub fn draw(
        &mut self,
        random: &mut Prng,
        load: ScanLoad,
        session: u64,
        history: &mut History,
    ) -> Option<(u64, ScanStep, Command<'static>)> {
        let own: Vec<usize> = (0..self.open.len()).filter(|&at| self.open[at].session == session).collect();
        let idle: Vec<usize> = own.iter().copied().filter(|&at| !self.open[at].is_in_use).collect();
        if own.len() < load.open_max && (idle.is_empty() || random.one_in(6)) {
            return Some(self.draw_creation(random, session, history));
        }
        if idle.is_empty() {
            return None;
        }
        let keys = self.order.len() as u64;
        let scan = &mut self.open[pick(random, &idle)];
        let iterator = scan.iterator?;
        let is_at_end = scan.place == ScanPlace::End;
        let (step, command) = match random.below(32) {
            0 => (ScanStep::Destroy, Command::DestroyIterator { iterator }),
            1..4 if is_at_end => (ScanStep::Destroy, Command::DestroyIterator { iterator }),
            // A second look at its range shows the same, whatever was written, flushed and compacted since.
            choice if is_at_end || choice < 5 => {
                let to = if random.one_in(2) { scan.start() } else { random.below(keys) as usize };
                let key = history.keys()[self.order[to]].clone();
                (ScanStep::Seek { to }, Command::SeekIterator { iterator, key })
            }
            _ => {
                let pairs_max = pick(random, &[1, 1, 2, 5, 1000]);
                let limit_bytes = scan.limit_bytes;
                (ScanStep::Next { pairs_max }, Command::NextPairs { iterator, limit_bytes, pairs_max })
            }
        };
        scan.is_in_use = true;
        Some((scan.number, step, command))
    }

    fn draw_creation(
        &mut self,
        random: &mut Prng,
        session: u64,
        history: &mut History,
    ) -> (u64, ScanStep, Command<'static>) {
        let keys = self.order.len();
        let first = if random.one_in(2) { random.below(keys as u64) as usize } else { 0 };
        let behind_last =
            if random.one_in(2) { first + 1 + random.below((keys - first) as u64) as usize } else { keys };
        let bound = |at: usize| match self.order.get(at) {
            Some(&key) if at > 0 => history.keys()[key].clone(),
            _ => Key::new(&[]).expect("an empty key is no longer than the limit"),
        };
        let (lower, upper) = (bound(first), bound(behind_last));
        let (reverse, keys_only) = (random.one_in(2), random.one_in(4));
        self.last_number += 1;
        self.open.push(Scan {
            number: self.last_number,
            session,
            iterator: None,
            created: history.begin_keyless(),
            interval: None,
            first,
            behind_last,
            reverse,
            keys_only,
            place: ScanPlace::At(if reverse { behind_last - 1 } else { first }),
            may_have_passed: false,
            lacks_blocks: false,
            seen: vec![None; keys],
            moment: Moment { after: 0, before: u64::MAX },
            limit_bytes: pick(random, &[200, 3_000, 64 << 10]),
            is_in_use: true,
        });
        (self.last_number, ScanStep::Create, Command::CreateIterator { lower, upper, reverse, keys_only })
    }

    /// A command of a scan had no effect: the scan goes on. A creation did not happen.
    pub fn not_executed(&mut self, number: u64, step: ScanStep) {
        match step {
            ScanStep::Create => self.end(number),
            _ => drop(self.release(number)),
        }
    }

    /// A pair, or several, that cannot be read may have been passed.
    pub fn unrecovered(&mut self, number: u64) {
        if let Some(scan) = self.release(number) {
            scan.may_have_passed = true;
        }
    }

    /// The next pair needs a longer buffer.
    ///
    /// # Errors
    /// If it does not.
    pub fn pair_too_large(&mut self, number: u64, buffer_bytes: u32) -> Result<(), String> {
        let Some(scan) = self.release(number) else { return Ok(()) };
        if buffer_bytes <= scan.limit_bytes {
            return Err(format!("a pair of {buffer_bytes} B is too large for {} B", scan.limit_bytes));
        }
        scan.limit_bytes = buffer_bytes;
        Ok(())
    }

    /// The iterator was created.
    pub fn created(&mut self, number: u64, iterator: RemoteIterator, history: &mut History) {
        if let Some(scan) = self.release(number) {
            scan.iterator = Some(iterator);
            scan.interval = history.end_keyless(scan.created);
            if let Some((began, ended)) = scan.interval {
                scan.moment = Moment { after: began, before: ended };
            }
        }
    }

    /// A seek or an end succeeded.
    pub fn changed(&mut self, number: u64, step: ScanStep) {
        let Some(scan) = self.release(number) else { return };
        match step {
            ScanStep::Seek { to } => scan.seek(to),
            _ => self.end(number),
        }
    }

    /// Checks the pairs of a response, of a volume of which blocks may be lost.
    ///
    /// # Errors
    /// The first violation.
    pub fn receive(
        &mut self,
        number: u64,
        step: ScanStep,
        pairs: &[u8],
        lacks_blocks: bool,
        history: &mut History,
    ) -> Result<(), String> {
        let Some(at) = self.open.iter().position(|scan| scan.number == number) else { return Ok(()) };
        let ScanStep::Next { pairs_max } = step else { return Err(format!("pairs of a {step:?}")) };
        let (scan, order) = (&mut self.open[at], &self.order);
        (scan.is_in_use, scan.lacks_blocks) = (false, lacks_blocks);
        let list = PairList::check(pairs).map_err(|short| format!("malformed pairs: {short:?}"))?;
        if list.count() > pairs_max || (list.count() == 0 && !list.is_end()) {
            return Err(format!("{} pairs for at most {pairs_max}", list.count()));
        }
        self.pairs += u64::from(list.count());
        for (key, value) in list.pairs() {
            let Some(index) = history.key_index(key) else {
                return Err(format!("a scan contains {key:?}, which no client stored"));
            };
            let at = order.iter().position(|&other| other == index).ok_or("a key without a place")?;
            let seen = match scan.keys_only {
                true if value.is_empty() => Observed::Present,
                true => {
                    return Err(format!("{}: a value, where only keys are wanted", history.keys()[index]));
                }
                false => history.identify_value(index, value, value.len() as u32)?,
            };
            scan.pass(at, seen, order, history)?;
        }
        if list.is_end() { scan.pass_all(order, history) } else { Ok(()) }
    }

    fn release(&mut self, number: u64) -> Option<&mut Scan> {
        let scan = self.open.iter_mut().find(|scan| scan.number == number)?;
        scan.is_in_use = false;
        Some(scan)
    }
}

impl Scan {
    /// The first key of its range, in its direction.
    fn start(&self) -> usize {
        if self.reverse { self.behind_last - 1 } else { self.first }
    }

    fn seek(&mut self, to: usize) {
        self.may_have_passed = false;
        self.place = match self.reverse {
            false if to >= self.behind_last => ScanPlace::End,
            false => ScanPlace::At(to.max(self.first)),
            true if to < self.first => ScanPlace::End,
            true => ScanPlace::At(to.min(self.behind_last - 1)),
        };
    }

    /// The keys from the place on, in the direction of the iterator.
    fn ahead(&self) -> Vec<usize> {
        match (self.place, self.reverse) {
            (ScanPlace::End, _) => Vec::new(),
            (ScanPlace::At(at), false) => (at..self.behind_last).collect(),
            (ScanPlace::At(at), true) => (self.first..=at).rev().collect(),
        }
    }

    /// The iterator gives the key at `at`: those before it are not there.
    fn pass(
        &mut self,
        at: usize,
        seen: Observed,
        order: &[usize],
        history: &mut History,
    ) -> Result<(), String> {
        let ahead = self.ahead();
        let Some(passed) = ahead.iter().position(|&other| other == at) else {
            let key = &history.keys()[order[at]];
            return Err(format!(
                "a scan contains {key}, which is not ahead of it: {}",
                self.describe(history)
            ));
        };
        let absent = if self.may_have_passed || self.lacks_blocks { &[][..] } else { &ahead[..passed] };
        for &absent in absent {
            self.note(absent, Observed::Absent, order, history)?;
        }
        self.may_have_passed = false;
        self.place = ahead.get(passed + 1).map_or(ScanPlace::End, |&next| ScanPlace::At(next));
        self.note(at, seen, order, history)
    }

    /// The iterator is at its end: the keys ahead of it are not there.
    fn pass_all(&mut self, order: &[usize], history: &mut History) -> Result<(), String> {
        let absent = if self.may_have_passed || self.lacks_blocks { Vec::new() } else { self.ahead() };
        for absent in absent {
            self.note(absent, Observed::Absent, order, history)?;
        }
        self.place = ScanPlace::End;
        Ok(())
    }

    /// Notes what the snapshot has of a key.
    fn note(
        &mut self,
        at: usize,
        seen: Observed,
        order: &[usize],
        history: &mut History,
    ) -> Result<(), String> {
        let (key, Some(interval)) = (order[at], self.interval) else { return Ok(()) };
        match self.seen[at].replace(seen) {
            Some(before) if before == seen => return Ok(()),
            Some(before) => {
                let key = &history.keys()[key];
                return Err(format!("{key}: {seen:?}, was {before:?}, in {}", self.describe(history)));
            }
            None => {}
        }
        let possible = moment_of(history.starts()[key], history.events(key), seen);
        self.moment.after = self.moment.after.max(possible.after);
        self.moment.before = self.moment.before.min(possible.before);
        if self.moment.after >= self.moment.before {
            let name = &history.keys()[key];
            let (moment, scan) = (possible, self.describe(history));
            return Err(format!(
                "{name}: {seen:?} was there in {moment:?}, what else the scan shows was not: {scan}"
            ));
        }
        history.record_snapshot_read(self.created, interval, key, seen);
        Ok(())
    }

    fn describe(&self, history: &History) -> String {
        let Scan { number, first, behind_last, reverse, place, interval, moment, .. } = self;
        format!(
            "scan {number} of places {first}..{behind_last} of {} keys, reverse: {reverse}, at {place:?}, created in {interval:?}, {moment:?}",
            history.keys().len()
        )
    }
}

/// The moments at which a key may have been as `seen`, as far as calls say it that do not overlap.
fn moment_of(start: KeyState, calls: &[CallRecord], seen: Observed) -> Moment {
    let is_put = |call: &&CallRecord| matches!(call.call, Call::Put { .. });
    let is_removal = |call: &&CallRecord| matches!(call.call, Call::Clear | Call::Delete);
    let may_have_happened = |call: &&CallRecord| !matches!(call.outcome, Some(CallResult::ConditionFailed));
    let is_acknowledged = |call: &&CallRecord| call.outcome == Some(CallResult::Acknowledged);
    let first_end = |ends: &mut dyn Iterator<Item = u64>| ends.min().unwrap_or(u64::MAX);
    let puts = || calls.iter().filter(is_put).filter(may_have_happened);
    let removals = || calls.iter().filter(is_removal).filter(may_have_happened);
    // A call may follow another unless it has ended when the other begins.
    let may_follow =
        |call: &CallRecord, other: &CallRecord| call.outcome.is_none() || call.ended > other.began;
    match seen {
        Observed::Value(operation) => {
            let put = calls.iter().find(
                |call| matches!(call.call, Call::Put { operation: other, mode: _, .. } if other == operation),
            );
            let is_behind = |call: &&CallRecord| match put {
                Some(put) => put.outcome.is_some() && call.began > put.ended,
                None => true,
            };
            let writes = || calls.iter().filter(|call| is_put(call) || is_removal(call));
            let mut ends = writes().filter(is_acknowledged).filter(is_behind).map(|call| call.ended);
            Moment { after: put.map_or(0, |put| put.began), before: first_end(&mut ends) }
        }
        Observed::Absent => {
            let is_removed = |put: &&CallRecord| removals().any(|removal| may_follow(removal, put));
            let mut ends = puts().filter(is_acknowledged).filter(|put| !is_removed(put)).map(|put| put.ended);
            let was_there = matches!(start, KeyState::Holds { .. });
            let first_removal = removals().map(|removal| removal.began).min().unwrap_or(0);
            Moment { after: if was_there { first_removal } else { 0 }, before: first_end(&mut ends) }
        }
        _ => {
            let is_put_again = |removal: &&CallRecord| puts().any(|put| may_follow(put, removal));
            let acknowledged = removals().filter(is_acknowledged);
            let mut ends = acknowledged.filter(|removal| !is_put_again(removal)).map(|removal| removal.ended);
            let first_put = puts().map(|put| put.began).min().unwrap_or(0);
            let was_missing = start == KeyState::Missing;
            Moment { after: if was_missing { first_put } else { 0 }, before: first_end(&mut ends) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_engine::PutMode;

    fn call(call: Call, began: u64, ended: u64) -> CallRecord {
        CallRecord { call, outcome: Some(CallResult::Acknowledged), began, ended, durable: false }
    }

    fn put(operation: u64, began: u64, ended: u64) -> CallRecord {
        call(Call::Put { operation, bytes: 10, mode: PutMode::Upsert }, began, ended)
    }

    #[test]
    fn a_value_is_there_from_the_begin_of_its_put_to_the_end_of_a_later_write() {
        let calls = [put(1, 10, 20), put(2, 15, 30), put(3, 25, 40), call(Call::Clear, 50, 60)];
        let moment = |start, seen| {
            let Moment { after, before } = moment_of(start, &calls, seen);
            (after, before)
        };
        let missing = KeyState::Missing;
        assert_eq!(moment(missing, Observed::Value(1)), (10, 40), "the second put may be the first");
        assert_eq!(moment(missing, Observed::Value(2)), (15, 60));
        assert_eq!(moment(missing, Observed::Value(3)), (25, 60));
        assert_eq!(moment(missing, Observed::Present), (10, 60));
        assert_eq!(moment(missing, Observed::Absent), (0, u64::MAX), "a removal follows each put");
        let held = KeyState::Holds { operation: 9, bytes: 10 };
        assert_eq!(moment(held, Observed::Value(9)), (0, 20));
        assert_eq!(moment(held, Observed::Absent), (50, u64::MAX));
        assert_eq!(moment_of(missing, &calls[..2], Observed::Absent).before, 20);
    }

    #[test]
    fn calls_without_a_known_end_bound_nothing() {
        let unknown = |record: CallRecord| CallRecord { outcome: None, ended: u64::MAX, ..record };
        let calls = [unknown(put(1, 10, 0)), put(2, 30, 40), unknown(call(Call::Clear, 5, 0))];
        assert_eq!(moment_of(KeyState::Missing, &calls, Observed::Value(1)).before, u64::MAX);
        assert_eq!(moment_of(KeyState::Missing, &calls, Observed::Absent).before, u64::MAX);
        assert_eq!(moment_of(KeyState::Missing, &calls, Observed::Value(2)).after, 30);
    }
}
