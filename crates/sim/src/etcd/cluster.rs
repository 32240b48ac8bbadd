//! The members of the cluster, their log, and the leader with its clock.
//!
//! ```text
//!   Leader(m) ──start_election, isolation of m──▶ no leader ──its time is over──▶ Leader(m'), up to date
//! ```
//! In: messages of clients, faults, time. Out: messages to clients. The leader applies an entry of the log at once, the
//! other members later. Without a leader, or on an isolated member, a request that needs one fails or waits, by chance;
//! what waits is executed when there is a leader again, even if the client has given up.
//!
//! Invariants: every entry of the log is applied by every member, in order; a lease ends only by an entry of the log,
//! which the leader adds after the lease's deadline on its clock, checked at intervals; a new leader gives every lease
//! its whole time to live again, and an election's time more.

use super::faults::{EtcdFault, MessageFaults};
use super::member::{EtcdMember, LogEntry, MemberOutput};
use super::state::EtcdState;
use super::transport::{EtcdTransport, Origin, ToMember};
use octokv_base::{Nanos, Prng};
use octokv_cluster::etcd::{
    EtcdError, EtcdRequest, EtcdResponse, LeaseId, LeaseTimeToLive, ResponseBody, Revision, WatchRequest,
};
use octokv_cluster::{RequestLimitReached, StoreDelivery};
use octokv_runtime::simulated::SimClock;
use std::collections::{BTreeMap, VecDeque};

/// The configuration of a cluster.
#[derive(Clone, Copy, Debug)]
pub struct EtcdConfig {
    /// The seed of delays, losses and elections.
    pub seed: u64,
    /// The number of members, at least 1.
    pub members: usize,
    /// The shortest time of a message between client and member, or between members.
    pub delay_min: Nanos,
    /// The longest.
    pub delay_max: Nanos,
    /// The time after which the outcome of a request without a response is unknown.
    pub request_timeout: Nanos,
    /// The maximum number of requests of a connection in flight.
    pub requests_max: usize,
    /// The interval at which the leader ends expired leases.
    pub lease_check_interval: Nanos,
    /// The shortest time to live of a lease, in seconds.
    pub lease_ttl_min_s: i64,
    /// What a new leader adds to the time to live of each lease.
    pub election_timeout: Nanos,
    /// The interval of periodic watch progress.
    pub progress_interval: Nanos,
    /// Whether compaction keeps the deletions of its own revision for watches: see [`super::store::MvccStore::new`].
    pub keeps_tombstones: bool,
}

impl EtcdConfig {
    /// Three members of etcd 3.4.23 in one data centre.
    pub fn new(seed: u64) -> EtcdConfig {
        EtcdConfig {
            seed,
            members: 3,
            delay_min: Nanos::from_micros(200),
            delay_max: Nanos::from_millis(2),
            request_timeout: Nanos::from_secs(2),
            requests_max: 64,
            lease_check_interval: Nanos::from_millis(500),
            lease_ttl_min_s: 2,
            election_timeout: Nanos::from_secs(1),
            progress_interval: Nanos::from_secs(600),
            keeps_tombstones: false,
        }
    }

    /// One member without delays.
    pub fn immediate() -> EtcdConfig {
        EtcdConfig { members: 1, delay_min: Nanos::ZERO, delay_max: Nanos::ZERO, ..EtcdConfig::new(0) }
    }
}

/// What happened in a cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EtcdStats {
    /// Entries of the log.
    pub log_entries: u64,
    /// Leases that ended because their time was over.
    pub expired_leases: u64,
    /// Elections.
    pub elections: u64,
    /// Requests, responses and watches lost by [`MessageFaults`].
    pub lost_messages: u64,
    /// Requests with an unknown outcome.
    pub unknown_outcomes: u64,
}

/// A cluster of etcd.
pub struct EtcdCluster {
    config: EtcdConfig,
    now: Nanos,
    random: Prng,
    transport: EtcdTransport,
    members: Vec<EtcdMember>,
    leader: Option<usize>,
    /// The end of an election.
    elected_at: Nanos,
    /// The entries that some member has not applied, and the number of those before.
    log: VecDeque<LogEntry>,
    log_start: u64,
    /// When each member other than the leader applies entries up to a number.
    replication: BTreeMap<(Nanos, u64), (usize, u64)>,
    /// Requests that wait for a leader.
    waiting: Vec<(usize, Origin, EtcdRequest)>,
    /// The clock of whichever member leads.
    clock: SimClock,
    /// The end of each lease, by the leader's clock.
    lease_deadlines: BTreeMap<LeaseId, Nanos>,
    progress_at: Nanos,
    sequence: u64,
    stats: EtcdStats,
}

impl EtcdCluster {
    /// A cluster with an empty store. Its first member leads.
    pub fn new(config: EtcdConfig) -> EtcdCluster {
        let mut random = Prng::new(config.seed);
        let delays = (config.delay_min, config.delay_max);
        let transport =
            EtcdTransport::new(random.fork(), delays, config.request_timeout, config.requests_max);
        let state = EtcdState::new(config.keeps_tombstones, config.lease_ttl_min_s);
        EtcdCluster {
            config,
            now: Nanos::ZERO,
            random,
            transport,
            members: (0..config.members).map(|_| EtcdMember::new(state.clone())).collect(),
            leader: Some(0),
            elected_at: Nanos::NEVER,
            log: VecDeque::new(),
            log_start: 0,
            replication: BTreeMap::new(),
            waiting: Vec::new(),
            clock: SimClock::default(),
            lease_deadlines: BTreeMap::new(),
            progress_at: config.progress_interval,
            sequence: 0,
            stats: EtcdStats::default(),
        }
    }

    /// Connects a client to a member. Returns the number of the connection.
    pub fn connect(&mut self, member: usize) -> usize {
        assert!(member < self.members.len(), "no member {member}");
        self.transport.connect(member)
    }

    /// See [`octokv_cluster::MembershipStore::submit`].
    ///
    /// # Errors
    /// If [`EtcdConfig::requests_max`] requests of the connection are in flight.
    pub fn submit(
        &mut self,
        now: Nanos,
        connection: usize,
        token: u64,
        request: EtcdRequest,
    ) -> Result<(), RequestLimitReached> {
        self.advance(now);
        self.transport.submit(now, connection, token, request)
    }

    /// See [`octokv_cluster::MembershipStore::watch`].
    pub fn watch(&mut self, now: Nanos, connection: usize, token: u64, request: WatchRequest) {
        self.advance(now);
        self.transport.watch(now, connection, token, request);
    }

    /// See [`octokv_cluster::MembershipStore::cancel_watch`].
    pub fn cancel_watch(&mut self, now: Nanos, connection: usize, token: u64) {
        self.advance(now);
        self.transport.cancel_watch(now, connection, token);
    }

    /// See [`octokv_cluster::MembershipStore::request_progress`].
    pub fn request_progress(&mut self, now: Nanos, connection: usize) {
        self.advance(now);
        self.transport.request_progress(now, connection);
    }

    /// See [`octokv_cluster::MembershipStore::poll`].
    pub fn poll(&mut self, now: Nanos, connection: usize) -> Option<StoreDelivery> {
        self.advance(now);
        self.transport.poll(connection)
    }

    /// Whether a connection has a delivery.
    pub fn has_arrived(&self, connection: usize) -> bool {
        self.transport.has_arrived(connection)
    }

    /// The time of the next event of the cluster.
    pub fn next_event_at(&self) -> Nanos {
        let applied_at = self.replication.first_key_value().map_or(Nanos::NEVER, |((at, _), _)| *at);
        let events = [
            self.transport.next_arrival(),
            applied_at,
            self.elected_at,
            self.next_lease_check(),
            self.clock.true_time(self.progress_at),
        ];
        events.into_iter().min().unwrap_or(Nanos::NEVER)
    }

    /// Runs the cluster up to `now`.
    pub fn advance(&mut self, now: Nanos) {
        loop {
            let at = self.next_event_at();
            if at > now {
                self.now = self.now.max(now);
                return;
            }
            self.now = self.now.max(at);
            self.run_events();
        }
    }

    /// Runs the events that are due.
    fn run_events(&mut self) {
        while let Some((origin, message)) = self.transport.next_due(self.now) {
            self.receive(origin, message);
        }
        while let Some(entry) = self.replication.first_entry() {
            if entry.key().0 > self.now {
                break;
            }
            let (member, through) = entry.remove();
            if !self.members[member].is_isolated {
                self.apply_through(member, through);
            }
        }
        if self.elected_at <= self.now {
            self.end_election();
        }
        if self.next_lease_check() <= self.now {
            self.end_expired_leases();
        }
        if self.progress_at <= self.clock.local(self.now) {
            self.progress_at = self.clock.local(self.now) + self.config.progress_interval;
            for member in 0..self.members.len() {
                self.with_member(member, |member, out| member.send_progress(None, out));
            }
        }
    }

    /// The present state, as the leader or else the most advanced member holds it.
    pub fn state(&self) -> &EtcdState {
        let newest = self.members.iter().max_by_key(|member| member.applied);
        &newest.expect("a cluster has a member").state
    }

    /// The member that leads, or `None` during an election.
    pub fn leader(&self) -> Option<usize> {
        self.leader
    }

    /// What has happened so far.
    pub fn stats(&self) -> EtcdStats {
        let (lost_messages, unknown_outcomes) = (self.transport.lost, self.transport.timed_out);
        EtcdStats { lost_messages, unknown_outcomes, ..self.stats }
    }

    /// Injects a fault.
    pub fn inject(&mut self, now: Nanos, fault: EtcdFault) {
        self.advance(now);
        match fault {
            EtcdFault::Messages(faults) => self.transport.faults = faults,
            EtcdFault::Election { duration } => self.start_election(duration),
            EtcdFault::Isolate { member, isolated } => self.set_isolated(member, isolated),
            EtcdFault::Lag { member, lag } => self.members[member].lag = lag,
            EtcdFault::ClockDrift { drift_ppm } => self.clock.set_drift(self.now, drift_ppm),
            EtcdFault::Compact => {
                let revision = self.state().store().revision();
                if self.leader.is_some() {
                    self.propose(EtcdRequest::Compact { revision }, None);
                }
            }
            EtcdFault::BreakWatches { connection } => self.break_watches(connection),
            EtcdFault::StallWatches { connection, stalled } => self.set_stalled(connection, stalled),
            EtcdFault::Cut { connection, to_member, to_client } => {
                self.transport.set_cut(self.now, connection, to_member, to_client);
            }
            EtcdFault::Reset { connection, member } => {
                let previous = &mut self.members[self.transport.member_of(connection)];
                previous.drop_watches(connection);
                previous.stalled.retain(|&other| other != connection);
                self.transport.reset(connection, member);
            }
        }
    }

    /// Ends the fault profile of messages, lags, isolation, cuts and stalls.
    pub fn end_faults(&mut self, now: Nanos) {
        self.inject(now, EtcdFault::Messages(MessageFaults::default()));
        self.inject(now, EtcdFault::ClockDrift { drift_ppm: 0 });
        for member in 0..self.members.len() {
            self.inject(now, EtcdFault::Lag { member, lag: Nanos::ZERO });
            self.inject(now, EtcdFault::Isolate { member, isolated: false });
        }
        for connection in 0..self.transport.connections() {
            self.inject(now, EtcdFault::Cut { connection, to_member: false, to_client: false });
            self.inject(now, EtcdFault::StallWatches { connection, stalled: false });
        }
    }

    fn receive(&mut self, origin: Origin, message: ToMember) {
        let member = self.transport.member_of(origin.connection);
        match message {
            ToMember::Request(request) => self.execute(member, origin, request),
            ToMember::Watch(request) => {
                if self.transport.is_watching(origin) {
                    self.with_member(member, |member, out| member.watch(origin, request, out));
                }
            }
            ToMember::CancelWatch => self.members[member].cancel_watch(origin),
            ToMember::RequestProgress => {
                let connection = Some(origin.connection);
                self.with_member(member, |member, out| member.send_progress(connection, out));
            }
        }
    }

    fn execute(&mut self, member: usize, origin: Origin, request: EtcdRequest) {
        if let EtcdRequest::Range(range) = &request
            && range.serializable
        {
            let result = self.members[member].state.read(range);
            self.transport.respond(self.now, origin, result);
            return;
        }
        if self.leader.is_none() || self.members[member].is_isolated {
            if self.random.one_in(2) {
                self.transport.respond(self.now, origin, Err(EtcdError::NoLeader));
            } else {
                self.waiting.push((member, origin, request));
            }
            return;
        }
        match request {
            EtcdRequest::Range(range) => {
                let committed = self.committed();
                self.with_member(member, |member, out| member.read_at(committed, origin, range, out));
            }
            EtcdRequest::LeaseKeepAlive { lease } => {
                let result = self.keep_alive(lease);
                self.transport.respond(self.now, origin, result);
            }
            EtcdRequest::LeaseTimeToLive { lease } => {
                let result = Ok(self.time_to_live(lease));
                self.transport.respond(self.now, origin, result);
            }
            write => self.propose(write, Some((member, origin))),
        }
    }

    fn committed(&self) -> u64 {
        self.log_start + self.log.len() as u64
    }

    /// Adds an entry to the log. REQUIRES: a leader.
    fn propose(&mut self, request: EtcdRequest, origin: Option<(usize, Origin)>) {
        let leader = self.leader.expect("a proposal needs a leader");
        self.log.push_back(LogEntry { request, origin });
        self.stats.log_entries += 1;
        let through = self.committed();
        self.apply_through(leader, through);
        let spread = self.config.delay_max.since(self.config.delay_min).0;
        for member in (0..self.members.len()).filter(|&member| member != leader) {
            let delay = self.config.delay_min + Nanos(self.random.below(spread + 1));
            self.replicate(member, self.now + delay + self.members[member].lag);
        }
    }

    /// Has a member apply the present log at this time.
    fn replicate(&mut self, member: usize, at: Nanos) {
        self.sequence += 1;
        self.replication.insert((at, self.sequence), (member, self.committed()));
    }

    fn apply_through(&mut self, index: usize, through: u64) {
        while self.members[index].applied < through {
            let at = (self.members[index].applied - self.log_start) as usize;
            let entry = self.log[at].clone();
            self.with_member(index, |member, out| member.apply(index, &entry, out));
            if self.leader == Some(index) {
                self.track_lease(&entry.request);
            }
        }
        let applied_by_all = self.members.iter().map(|member| member.applied).min().unwrap_or(0);
        while self.log_start < applied_by_all {
            self.log.pop_front();
            self.log_start += 1;
        }
    }

    /// Sets or forgets the deadline of a lease that the leader has granted or ended.
    fn track_lease(&mut self, request: &EtcdRequest) {
        let (EtcdRequest::LeaseGrant { lease, .. } | EtcdRequest::LeaseRevoke { lease }) = request else {
            return;
        };
        match self.state().leases().get(lease).map(|state| state.ttl_s) {
            // A grant that failed, because the lease exists, changes nothing.
            Some(_) if self.lease_deadlines.contains_key(lease) => {}
            Some(ttl_s) => self.restart_lease(*lease, ttl_s, Nanos::ZERO),
            None => drop(self.lease_deadlines.remove(lease)),
        }
    }

    fn restart_lease(&mut self, lease: LeaseId, ttl_s: i64, extension: Nanos) {
        let ttl = Nanos::from_secs(1).times(ttl_s.unsigned_abs() as usize);
        self.lease_deadlines.insert(lease, self.clock.local(self.now) + ttl + extension);
    }

    fn keep_alive(&mut self, lease: LeaseId) -> Result<EtcdResponse, EtcdError> {
        let deadline = self.lease_deadlines.get(&lease).copied().unwrap_or(Nanos::ZERO);
        if deadline <= self.clock.local(self.now) {
            return Err(EtcdError::LeaseNotFound);
        }
        let (ttl_s, revision) = {
            let state = self.state();
            (state.leases()[&lease].ttl_s, state.store().revision())
        };
        self.restart_lease(lease, ttl_s, Nanos::ZERO);
        Ok(EtcdResponse { revision, body: ResponseBody::Lease { lease, ttl_s } })
    }

    fn time_to_live(&self, lease: LeaseId) -> EtcdResponse {
        let state = self.state();
        let found = state.leases().get(&lease).map(|found| {
            let deadline = self.lease_deadlines.get(&lease).copied().unwrap_or(Nanos::ZERO);
            let remaining = deadline.since(self.clock.local(self.now));
            LeaseTimeToLive {
                granted_ttl_s: found.ttl_s,
                remaining_s: (remaining.0 / Nanos::from_secs(1).0) as i64,
                keys: found.keys.iter().cloned().collect(),
            }
        });
        EtcdResponse { revision: state.store().revision(), body: ResponseBody::TimeToLive(found) }
    }

    /// The first check, at a multiple of the interval on the leader's clock, that finds an expired lease.
    fn next_lease_check(&self) -> Nanos {
        let first = self.lease_deadlines.values().min().copied();
        let (Some(first), Some(_)) = (first, self.leader) else { return Nanos::NEVER };
        let interval = self.config.lease_check_interval.0;
        self.clock.true_time(Nanos(first.0.div_ceil(interval).saturating_mul(interval))).max(self.now)
    }

    fn end_expired_leases(&mut self) {
        let local = self.clock.local(self.now);
        let mut expired: Vec<(Nanos, LeaseId)> = self
            .lease_deadlines
            .iter()
            .filter(|(_, deadline)| **deadline <= local)
            .map(|(lease, deadline)| (*deadline, *lease))
            .collect();
        expired.sort_unstable();
        for (_, lease) in expired {
            self.stats.expired_leases += 1;
            self.propose(EtcdRequest::LeaseRevoke { lease }, None);
        }
    }

    fn start_election(&mut self, duration: Nanos) {
        self.stats.elections += 1;
        self.leader = None;
        self.elected_at = self.now + duration;
    }

    fn end_election(&mut self) {
        self.elected_at = Nanos::NEVER;
        let candidates: Vec<usize> =
            (0..self.members.len()).filter(|&member| !self.members[member].is_isolated).collect();
        if candidates.is_empty() {
            // Decided when a member is reachable again.
            return;
        }
        let leader = candidates[self.random.below(candidates.len() as u64) as usize];
        self.apply_through(leader, self.committed());
        self.leader = Some(leader);
        let leases: Vec<_> =
            self.state().leases().iter().map(|(lease, state)| (*lease, state.ttl_s)).collect();
        self.lease_deadlines.clear();
        for (lease, ttl_s) in leases {
            self.restart_lease(lease, ttl_s, self.config.election_timeout);
        }
        self.execute_waiting();
    }

    /// Executes what waited for a leader.
    fn execute_waiting(&mut self) {
        for (member, origin, request) in std::mem::take(&mut self.waiting) {
            if self.members[member].is_isolated {
                self.waiting.push((member, origin, request));
            } else {
                self.execute(member, origin, request);
            }
        }
    }

    fn set_isolated(&mut self, member: usize, isolated: bool) {
        if self.members[member].is_isolated == isolated {
            return;
        }
        self.members[member].is_isolated = isolated;
        if isolated && self.leader == Some(member) {
            self.start_election(self.config.election_timeout);
        }
        if !isolated {
            self.replicate(member, self.now + self.config.delay_max + self.members[member].lag);
            match self.leader {
                Some(_) => self.execute_waiting(),
                None if self.elected_at == Nanos::NEVER => self.start_election(self.config.election_timeout),
                None => {}
            }
        }
    }

    fn set_stalled(&mut self, connection: usize, stalled: bool) {
        let member = self.transport.member_of(connection);
        self.with_member(member, |member, out| {
            member.stalled.retain(|&other| other != connection);
            if stalled {
                member.stalled.push(connection);
            }
            member.send_changes(out);
        });
    }

    fn break_watches(&mut self, connection: usize) {
        self.members[self.transport.member_of(connection)].drop_watches(connection);
        self.transport.break_watches(connection);
    }

    /// Runs `action` on a member and sends what it puts out.
    fn with_member(&mut self, member: usize, action: impl FnOnce(&mut EtcdMember, &mut Vec<MemberOutput>)) {
        let mut out = Vec::new();
        action(&mut self.members[member], &mut out);
        for output in out {
            match output {
                MemberOutput::Response(origin, result) => self.transport.respond(self.now, origin, result),
                MemberOutput::Update(origin, update) => {
                    if self.transport.is_watching(origin) && !self.transport.update(self.now, origin, update)
                    {
                        self.break_watches(origin.connection);
                    }
                }
            }
        }
    }

    /// The store's newest revision.
    pub fn revision(&self) -> Revision {
        self.state().store().revision()
    }
}
