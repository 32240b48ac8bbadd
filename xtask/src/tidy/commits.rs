//! New commits have a subject `crate: imperative summary` of at most 72 characters, and a body that says why.
//! In: `git log` since the rule began. Out: findings by commit. Outside a git checkout there is nothing to check.

use std::path::Path;
use std::process::Command;

use super::tree::Finding;

/// Commits before this date are older than the rule.
const RULE_SINCE: &str = "2026-11-22T08:00:00Z";
/// The longest subject, in characters.
const SUBJECT_CHARS_MAX: usize = 72;

/// One commit's message.
pub struct CommitMessage {
    /// The abbreviated hash.
    pub id: String,
    /// The first line.
    pub subject: String,
    /// Everything after it.
    pub body: String,
}

/// Reads the messages of the commits that the rule covers; none without git or outside of a checkout.
pub fn read(root: &Path) -> Vec<CommitMessage> {
    let since = format!("--since={RULE_SINCE}");
    let log = Command::new("git")
        .args(["log", "--no-merges", &since, "--format=%h%x00%s%x00%b%x01"])
        .current_dir(root)
        .output();
    match log {
        Ok(output) if output.status.success() => parse(&String::from_utf8_lossy(&output.stdout)),
        _ => Vec::new(),
    }
}

fn parse(log: &str) -> Vec<CommitMessage> {
    let fields = |record: &str| {
        let mut fields = record.trim_start_matches('\n').splitn(3, '\0').map(str::to_owned);
        Some(CommitMessage { id: fields.next()?, subject: fields.next()?, body: fields.next()? })
    };
    log.split('\u{1}').filter_map(fields).collect()
}

/// Checks the messages.
pub fn check(commits: &[CommitMessage]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for commit in commits {
        let place = format!("commit {} ({})", commit.id, commit.subject);
        if commit.subject.chars().count() > SUBJECT_CHARS_MAX {
            let message = format!("the subject is longer than {SUBJECT_CHARS_MAX} characters");
            findings.push(Finding::new(&place, 0, message));
        }
        if !has_scope(&commit.subject) {
            findings.push(Finding::new(&place, 0, "the subject is not `crate: imperative summary`"));
        }
        if commit.body.trim().is_empty() {
            findings.push(Finding::new(&place, 0, "no body says why"));
        }
    }
    findings
}

/// `engine: …`, `sim, lab: …`, `docs/decisions: …`.
fn has_scope(subject: &str) -> bool {
    subject.split_once(": ").is_some_and(|(scope, summary)| {
        let named = |c: char| c.is_ascii_alphanumeric() || "_/., -".contains(c);
        !scope.is_empty() && scope.chars().all(named) && !summary.is_empty()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(subject: &str, body: &str) -> Vec<String> {
        let commit = CommitMessage { id: "1".into(), subject: subject.into(), body: body.into() };
        check(&[commit]).into_iter().map(|finding| finding.message).collect()
    }

    #[test]
    fn a_commit_names_its_crate_and_says_why() {
        assert_eq!(messages("engine: refuse unknown hash kinds", "They were read as XXH3."), [""; 0]);
        assert_eq!(messages("sim, lab: share one runner", "Two copies drifted."), [""; 0]);
        assert_eq!(messages("Mends things", "Why."), ["the subject is not `crate: imperative summary`"]);
        assert_eq!(messages("engine: refuse unknown hash kinds", "\n"), ["no body says why"]);
        let long = format!("engine: {}", "x".repeat(65));
        assert_eq!(messages(&long, "Why."), ["the subject is longer than 72 characters"]);
    }

    #[test]
    fn the_log_is_split_into_commits() {
        let commits = parse("a1\0engine: one\0Why.\n\u{1}\nb2\0wire: two\0\u{1}\n");
        assert_eq!(commits.len(), 2);
        assert_eq!((commits[1].id.as_str(), commits[1].subject.as_str()), ("b2", "wire: two"));
        assert_eq!(commits[0].body, "Why.\n");
    }
}
