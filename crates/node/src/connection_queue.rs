//! In what order the connections of a core have their part of a turn: those who ask for little first.
//!
//! ```text
//!   little:  c d a b          all of them, while the turn has time
//!   much:    g h e f          then these, one at the least
//!            └─ each line begins with whoever had no time the last time
//! ```
//! In: connections, and whether each asks for much. Out: who is next. That those who ask for little go first costs the
//! others little, by what the word means; that one of the others always goes keeps many of the first kind from
//! holding them up for ever (as flow queues with sparse flows have it: RFC 8290, section 4.2).

/// Connections of one turn.
#[derive(Debug, Default)]
pub struct Line {
    little: Part,
    much: Part,
    /// Who is on turn asks for much; and somebody of these has had a part.
    on_turn_asks_much: bool,
    much_had_part: bool,
}

/// How many of those who had no time are remembered: the first of them may have nothing to do the next time.
const FIRST: usize = 8;

#[derive(Debug, Default)]
struct Part {
    members: Vec<u32>,
    /// The next member, in this turn.
    at: usize,
    /// The first of those who had no time in the last one.
    first: Vec<u32>,
}

impl Part {
    /// Those who had no time come first.
    fn begin(&mut self) {
        let mut places =
            self.first.drain(..).filter_map(|first| self.members.iter().position(|&member| member == first));
        let place = places.next().unwrap_or(0);
        drop(places);
        self.members.rotate_left(place);
        self.at = 0;
    }

    fn next(&mut self) -> Option<u32> {
        let next = self.members.get(self.at).copied();
        self.at += usize::from(next.is_some());
        next
    }

    fn end(&mut self) {
        let rest = &self.members[self.at..];
        self.first.extend_from_slice(&rest[..rest.len().min(FIRST)]);
    }

    fn rest(&self) -> impl Iterator<Item = u32> {
        self.members[self.at..].iter().copied()
    }
}

impl Line {
    /// A line of these, each with whether it asks for much.
    pub fn form(&mut self, members: impl Iterator<Item = (u32, bool)>) {
        self.little.members.clear();
        self.much.members.clear();
        for (member, much) in members {
            let part = if much { &mut self.much } else { &mut self.little };
            part.members.push(member);
        }
        self.little.begin();
        self.much.begin();
        self.much_had_part = false;
    }

    /// How many are in it.
    pub fn len(&self) -> usize {
        self.little.members.len() + self.much.members.len()
    }

    /// Who is next, where `over` says whether the turn has had its time.
    pub fn next(&mut self, over: bool) -> Option<u32> {
        self.on_turn_asks_much = false;
        if !over && let Some(next) = self.little.next() {
            return Some(next);
        }
        self.on_turn_asks_much = true;
        if over && self.much_had_part { None } else { self.much.next() }
    }

    /// Who is on turn had something to do.
    pub fn had_part(&mut self) {
        self.much_had_part |= self.on_turn_asks_much;
    }

    /// Ends the line: who was not reached is remembered.
    pub fn end(&mut self) {
        self.little.end();
        self.much.end();
    }

    /// Those that were not reached.
    pub fn rest(&self) -> impl Iterator<Item = u32> {
        self.little.rest().chain(self.much.rest())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Members 0 to 4 ask for little, 5 to 9 for much; a turn has time for so many of them.
    fn turn(line: &mut Line, time: usize) -> Vec<u32> {
        line.form((0..10).map(|member| (member, member >= 5)));
        let mut had = Vec::new();
        while let Some(member) = line.next(had.len() >= time) {
            had.push(member);
            line.had_part();
        }
        line.end();
        let mut all: Vec<u32> = had.iter().copied().chain(line.rest()).collect();
        all.sort_unstable();
        assert_eq!(all, (0..10).collect::<Vec<u32>>(), "whoever had no turn is told of");
        had
    }

    #[test]
    fn little_goes_before_much() {
        assert_eq!(turn(&mut Line::default(), 100), (0..10).collect::<Vec<u32>>());
        assert_eq!(turn(&mut Line::default(), 7), (0..7).collect::<Vec<u32>>());
    }

    #[test]
    fn whoever_had_no_time_is_first_the_next_time() {
        let line = &mut Line::default();
        assert_eq!(turn(line, 7), [0, 1, 2, 3, 4, 5, 6]);
        assert_eq!(turn(line, 7), [0, 1, 2, 3, 4, 7, 8]);
        assert_eq!(turn(line, 7), [0, 1, 2, 3, 4, 9, 5]);
        assert_eq!(turn(line, 7), [0, 1, 2, 3, 4, 6, 7]);
    }

    #[test]
    fn many_who_ask_for_little_hold_nobody_up_for_ever() {
        let line = &mut Line::default();
        assert_eq!(turn(line, 3), [0, 1, 2, 5]);
        assert_eq!(turn(line, 3), [3, 4, 0, 6]);
        assert_eq!(turn(line, 3), [1, 2, 3, 7]);
        assert_eq!(turn(line, 0), [8], "a turn without time, too");
    }

    #[test]
    fn who_asks_for_much_and_has_nothing_to_do_takes_nobodys_part() {
        let line = &mut Line::default();
        line.form([(5, true), (6, true), (7, true), (1, false)].into_iter());
        assert_eq!((line.next(true), line.next(true)), (Some(5), Some(6)));
        line.had_part();
        assert_eq!(line.next(true), None);
        line.end();
        assert_eq!(line.rest().collect::<Vec<u32>>(), [1, 7]);
    }

    #[test]
    fn whoever_is_gone_leaves_the_others_as_they_were() {
        let line = &mut Line::default();
        turn(line, 6);
        line.form([(7, true), (8, true)].into_iter());
        assert_eq!(line.next(false), Some(7));
        line.form(std::iter::empty());
        assert_eq!(line.next(false), None);
        line.end();
        assert_eq!(line.rest().count(), 0);
    }
}
