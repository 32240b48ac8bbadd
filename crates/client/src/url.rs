//! Namespace URLs: `nvme+tcp://HOST:PORT/NQN?nsid=N`.
//!
//! HOST is a name, an IPv4 address or an IPv6 address in brackets. The port defaults to 4420, the namespace to 1.

use octokv_base::NamespaceId;
use octokv_wire::nqn;
use std::fmt;

/// Default port of NVMe/TCP.
pub const DEFAULT_PORT: u16 = 4420;
const SCHEME: &str = "nvme+tcp://";

/// One namespace of one subsystem at one address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Url {
    /// Host name or address, without brackets.
    pub host: String,
    /// TCP port.
    pub port: u16,
    /// NQN of the subsystem.
    pub subsystem: String,
    /// Namespace identifier.
    pub namespace: NamespaceId,
}

/// Reason for the rejection of a URL.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidUrl {
    /// The URL does not begin with `nvme+tcp://`.
    #[error("it does not begin with {SCHEME}")]
    Scheme,
    /// The host is missing or malformed.
    #[error("it names no host")]
    Host,
    /// The port is not a number from 0 to 65535.
    #[error("\"{0}\" is not a port")]
    Port(String),
    /// The subsystem NQN is invalid.
    #[error("after the host: {0}")]
    Subsystem(nqn::InvalidNqn),
    /// A parameter other than `nsid`, or an invalid namespace identifier.
    #[error("\"{0}\" is not nsid=N with N from 1 to 4294967294")]
    Parameter(String),
}

impl std::str::FromStr for Url {
    type Err = InvalidUrl;

    fn from_str(text: &str) -> Result<Url, InvalidUrl> {
        let rest = text.strip_prefix(SCHEME).ok_or(InvalidUrl::Scheme)?;
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (name, query) = path.split_once('?').unwrap_or((path, ""));
        let (host, port) = split_port(authority)?;
        let subsystem = nqn::check(name).map_err(InvalidUrl::Subsystem)?.to_string();
        let mut namespace = NamespaceId(1);
        for parameter in query.split('&').filter(|p| !p.is_empty()) {
            let bad = || InvalidUrl::Parameter(parameter.to_string());
            let number = parameter.strip_prefix("nsid=").ok_or_else(bad)?;
            let id: u32 = number.parse().map_err(|_| bad())?;
            if id == 0 || id == u32::MAX {
                return Err(bad());
            }
            namespace = NamespaceId(id);
        }
        Ok(Url { host, port, subsystem, namespace })
    }
}

fn split_port(authority: &str) -> Result<(String, u16), InvalidUrl> {
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, after) = rest.split_once(']').ok_or(InvalidUrl::Host)?;
            (host, if after.is_empty() { "" } else { after.strip_prefix(':').ok_or(InvalidUrl::Host)? })
        }
        None => authority.rsplit_once(':').unwrap_or((authority, "")),
    };
    if host.is_empty() || (host.contains(':') && !authority.starts_with('[')) {
        return Err(InvalidUrl::Host);
    }
    let number = match port {
        "" => DEFAULT_PORT,
        _ => port.parse().map_err(|_| InvalidUrl::Port(port.to_string()))?,
    };
    Ok((host.to_string(), number))
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Url { host, port, subsystem, namespace } = self;
        match host.contains(':') {
            true => write!(f, "{SCHEME}[{host}]:{port}/{subsystem}?nsid={namespace}"),
            false => write!(f, "{SCHEME}{host}:{port}/{subsystem}?nsid={namespace}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NQN: &str = "nqn.2026-11.io.octokv:node";

    #[test]
    fn urls_round_trip() {
        let table = [
            ("127.0.0.1:4421", "127.0.0.1", 4421),
            ("[::1]:4421", "::1", 4421),
            ("[::1]", "::1", 4420),
            ("node7", "node7", 4420),
        ];
        for (authority, host, port) in table {
            let url: Url = format!("nvme+tcp://{authority}/{NQN}?nsid=3").parse().unwrap();
            let want =
                Url { host: host.to_string(), port, subsystem: NQN.to_string(), namespace: NamespaceId(3) };
            assert_eq!(url, want);
            assert_eq!(url.to_string().parse(), Ok(want));
        }
        let short: Url = format!("nvme+tcp://h/{NQN}").parse().unwrap();
        assert_eq!(short.namespace, NamespaceId(1));
    }

    #[test]
    fn invalid_urls_are_rejected_with_the_reason() {
        let parameter = |text: &str| InvalidUrl::Parameter(text.to_string());
        let table = [
            (format!("tcp://h/{NQN}"), InvalidUrl::Scheme),
            (format!("nvme+tcp:///{NQN}"), InvalidUrl::Host),
            (format!("nvme+tcp://::1/{NQN}"), InvalidUrl::Host),
            (format!("nvme+tcp://[::1/{NQN}"), InvalidUrl::Host),
            (format!("nvme+tcp://[::1]x/{NQN}"), InvalidUrl::Host),
            (format!("nvme+tcp://h:70000/{NQN}"), InvalidUrl::Port("70000".to_string())),
            ("nvme+tcp://h".to_string(), InvalidUrl::Subsystem(nqn::InvalidNqn::Empty)),
            (format!("nvme+tcp://h/{NQN}?nsid=0"), parameter("nsid=0")),
            (format!("nvme+tcp://h/{NQN}?ns=1"), parameter("ns=1")),
        ];
        for (text, want) in table {
            assert_eq!(text.parse::<Url>(), Err(want), "{text}");
        }
    }
}
