//! What comes in: connections, messages of other cores, bytes of hosts, and the requests in them.
//!
//! In: sockets and the mailbox. Out: links, requests that begin here or elsewhere (`crate::dispatch`). Invariants: those of
//! the reactor; a link has its part of a turn (`crate::share`), and while requests wait for room nothing is received.

use super::{ACCEPTS_PER_TURN, Finished, Message, Reactor};
use crate::connection_io::{Link, Room};
use crate::core_metrics::Tally;
use crate::request_queue::{Job, Jobs};
use crate::request_scheduler::{Dispatch, Note};
use crate::tenants::OTHERS;
use octokv_base::Nanos;
use octokv_nvmf::{Connection, Request};
use octokv_runtime::{Mailbox, SocketId, Sockets, Stage};
use octokv_sched::{CoreId, FlowId, Route};
use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;

/// What takes in the requests of this core's connections.
struct Admission<'a> {
    core: CoreId,
    dispatch: &'a mut Dispatch,
    jobs: &'a mut Jobs,
    mailbox: &'a mut Mailbox<Message>,
    tally: &'a Tally,
    now: Nanos,
}

impl Admission<'_> {
    /// Has a link's requests begin here or elsewhere, now or later, and leaves the vector empty.
    fn admit(self, link: u32, flow: FlowId, requests: &mut Vec<Request>) {
        let Admission { core, dispatch, jobs, mailbox, tally, now } = self;
        let count = requests.len() as u64;
        let stamp = tally.begun(flow, count);
        let jobs_of = requests.drain(..).map(|Request { slot, namespace, operation }| Job {
            home: core,
            link,
            slot,
            namespace,
            operation,
            flow,
            stamp,
            note: Note::NONE,
        });
        if dispatch.is_plain() {
            jobs_of.for_each(|job| jobs.push(job));
            return tally.own_here(count);
        }
        let mut stayed = 0;
        for mut job in jobs_of {
            if let Route::Move(to) = dispatch.route(&job) {
                let stamp = job.stamp;
                job.stamp = tally.towards(to, flow, stamp);
                match mailbox.send(to.index(), Message::Work(job)) {
                    Ok(()) => {
                        tally.moved(to);
                        continue;
                    }
                    // A ring that is full keeps its core busy enough.
                    Err(Message::Work(back)) => job = Job { stamp, ..back },
                    Err(Message::Adopt { .. } | Message::Done(_)) => unreachable!("work was sent"),
                }
            }
            stayed += 1;
            dispatch.keep(job, jobs, tally, now);
        }
        tally.own_here(stayed);
    }
}

impl<S: Sockets, F: Future<Output = Infallible>> Reactor<S, F> {
    pub(super) fn accept(&mut self, now: Nanos) -> bool {
        if self.draining {
            return false;
        }
        let mut worked = false;
        for index in 0..self.listeners.len() {
            let (listener, address) = self.listeners[index];
            // The other cores may have no room for them: then the kernel's line holds newcomers.
            for _ in self.undealt.len()..ACCEPTS_PER_TURN {
                let Some((socket, peer)) = self.sockets.accept(listener) else { break };
                let local = (self.local_address)(&self.sockets, socket).unwrap_or(address);
                self.undealt.push_back((socket, local, peer));
                worked = true;
            }
        }
        while let Some((socket, local, peer)) = self.undealt.pop_front() {
            // I/O queues are dealt evenly. An admin queue, known for one when it has connected, does not count: a host
            // of one I/O queue would else have that on every second core, as would all others.
            let to = self.dealt.wrapping_sub(self.target.controllers_made()) % self.mailbox.cores();
            if to == self.core {
                self.adopt(socket, local, peer, now);
            } else if self.mailbox.room(to) == 0 {
                self.undealt.push_front((socket, local, peer));
                break;
            } else if let Some(socket) = self.sockets.detach(socket) {
                let sent = self.mailbox.send(to, Message::Adopt { socket, local, peer });
                assert!(sent.is_ok(), "the ring had room");
            }
            self.dealt += 1;
        }
        worked
    }

    pub(super) fn take_messages(&mut self, now: Nanos) -> bool {
        let mut worked = false;
        while let Some(message) = self.mailbox.receive() {
            worked = true;
            match message {
                Message::Adopt { socket, local, peer } => {
                    let socket = self.sockets.attach(socket);
                    self.adopt(socket, local, peer, now);
                }
                Message::Work(job) => self.dispatch.keep(job, &mut self.jobs, &self.tally, now),
                Message::Done(done) => self.answer(now, done),
            }
        }
        worked
    }

    pub(super) fn adopt(&mut self, socket: SocketId, local: SocketAddr, peer: SocketAddr, now: Nanos) {
        // Asked here and not at accept, where those that were not adopted yet do not count.
        if !self.target.has_room() {
            if let Some(untold) = self.gate.open(now) {
                tracing::warn!(%peer, untold, "refused: connections_max are open");
            }
            self.sockets.close(socket);
            return;
        }
        if let Some(untold) = self.gate.open(now) {
            tracing::info!(%peer, core = self.core, untold, "connected");
        }
        let link = Link::new(socket, Connection::new(Arc::clone(&self.target), local, peer, now));
        let index = self.free_links.pop().unwrap_or_else(|| {
            self.links.push(None);
            (self.links.len() - 1) as u32
        });
        self.links[index as usize] = Some(link);
        self.by_socket.insert(socket, index);
        self.next_tick = now;
    }

    pub(super) fn receive(&mut self, now: Nanos) -> bool {
        if self.draining || !self.jobs.is_empty() {
            return false;
        }
        let mut worked = false;
        let mut ready = std::mem::take(&mut self.ready);
        ready.clear();
        self.sockets.ready(&mut ready);
        let share = self.this_turn.share(self.talkers);
        let Reactor { sockets, buffer, pool, requests, jobs, workers, links, handle, finished, .. } = self;
        let Reactor { dispatch, mailbox, tally, scheduling, costs, .. } = self;
        let core = CoreId::at(self.core);
        self.receiving.form(ready.iter().filter_map(|socket| {
            let index = *self.by_socket.get(socket)?;
            let link = links[index as usize].as_ref().filter(|link| link.may_receive())?;
            if link.flow.is_some_and(|flow| dispatch.is_full(flow)) {
                return None;
            }
            Some((index, self.this_turn.asks_much(link.talk)))
        }));
        // What led up to this is not the first link's doing.
        let mut before = handle.busy().since_lap();
        let mut news = std::mem::take(&mut self.news);
        while let Some(index) = self.receiving.next(self.this_turn.is_over()) {
            let Some(link) = &mut links[index as usize] else { continue };
            let mut of_link = Nanos::ZERO;
            let flow = link.flow_of(scheduling.flows());
            let run = |connection: &mut Connection, requests: &mut Vec<Request>| {
                handle.busy().charge(Stage::Target, costs.target.times(requests.len()));
                let lap = handle.busy().lap(Stage::Target, true);
                tally.worked(flow, lap);
                Admission { core, dispatch, jobs, mailbox, tally, now }.admit(index, flow, requests);
                let started = jobs.start(workers);
                let second = handle.busy().lap(Stage::Kv, started);
                tally.worked(flow, second);
                of_link = of_link + lap + second;
                // What is answered already is owed by its own length, and no more by what it might have come to.
                let own = |done: &mut Finished| done.home == core && done.link == index && done.flow == flow;
                let mut answers = tally.answers(flow, now + handle.busy().within_turn());
                for done in finished.borrow_mut().extract_if(.., own) {
                    dispatch.done(done.note, &done.outcome);
                    answers.add(done.stamp);
                    connection.complete(now, done.slot, done.outcome);
                }
                drop(answers);
                match jobs.is_empty() && of_link < share {
                    true if of_link.0 < share.0 / 4 => Room::More,
                    true => Room::Scarce,
                    false => Room::Enough,
                }
            };
            let received = link.receive(now, sockets, buffer, pool, run, requests);
            of_link = of_link.since(std::mem::take(&mut before));
            if let Some(bytes) = received {
                tally.bytes(flow, bytes);
                self.receiving.had_part();
                link.quantum.learn(bytes, of_link, share);
                self.this_turn.receiving = self.this_turn.receiving + of_link;
                self.this_turn.took(&mut link.talk, of_link);
                worked = true;
                news.push(index);
            }
        }
        self.receiving.end();
        self.talkers = news.len();
        for index in news.drain(..) {
            self.has_news(index);
        }
        self.news = news;
        self.ready = ready;
        worked
    }

    /// Offers stalled machines their bytes again, in turn, while this turn has time.
    pub(super) fn resume(&mut self, now: Nanos) -> bool {
        if self.draining || !self.jobs.is_empty() {
            return false;
        }
        let mut worked = false;
        let mut line = std::mem::take(&mut self.resuming);
        let stalled = self.links.iter().enumerate().filter_map(|(index, link)| {
            let link = link.as_ref().filter(|link| link.is_stalled())?;
            let full = link.flow.is_some_and(|flow| self.dispatch.is_full(flow));
            (!full).then_some((index as u32, true))
        });
        line.form(stalled);
        let share = self.this_turn.share(line.len());
        let mut before = self.handle.busy().since_lap();
        while self.jobs.is_empty()
            && let Some(index) = line.next(self.this_turn.is_over())
        {
            let Some(link) = &mut self.links[index as usize] else { continue };
            let bytes = link.resume(now, &self.pool, &mut self.requests);
            let flow = link.flow.unwrap_or(OTHERS);
            self.handle.busy().charge(Stage::Target, self.costs.target.times(self.requests.len()));
            let lap = self.handle.busy().lap(Stage::Target, bytes > 0);
            let mut of_link = lap.since(std::mem::take(&mut before));
            let Reactor { dispatch, jobs, mailbox, tally, requests, .. } = self;
            Admission { core: CoreId::at(self.core), dispatch, jobs, mailbox, tally, now }
                .admit(index, flow, requests);
            let started = self.begin_requests(now);
            of_link = of_link + self.handle.busy().lap(Stage::Kv, started);
            self.tally.worked(flow, of_link);
            if let Some(link) = &mut self.links[index as usize]
                && bytes > 0
            {
                link.quantum.learn(bytes, of_link, share);
                self.this_turn.took(&mut link.talk, of_link);
                line.had_part();
                worked = true;
            }
            self.this_turn.receiving = self.this_turn.receiving + of_link;
            self.has_news(index);
        }
        line.end();
        self.resuming = line;
        worked
    }
}
