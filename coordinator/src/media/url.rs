//! The parts of an `http` or `https` URL. Stricter than browsers: what is read in two ways by two readers is refused.

use std::net::Ipv6Addr;

/// A URL that can be asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remote {
    /// Over TLS.
    pub tls: bool,
    /// Name or address, in lower case, without brackets and without a final dot.
    pub host: String,
    /// Port.
    pub port: u16,
    /// Path and query, from the slash on.
    pub target: String,
}

/// Splits `url` after its scheme. `None`: it is not written as it should be.
pub(super) fn remote(tls: bool, rest: &str) -> Option<Remote> {
    // Nothing that some readers skip, some encode and others take as a slash.
    if !rest.bytes().all(|byte| byte.is_ascii_graphic()) || rest.contains('\\') {
        return None;
    }
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let (authority, after) = rest.split_at(end);
    let (host, port) = match authority.strip_prefix('[') {
        Some(bracketed) => {
            let (host, port) = bracketed.split_once(']')?;
            (
                host,
                if port.is_empty() {
                    None
                } else {
                    Some(port.strip_prefix(':')?)
                },
            )
        }
        None => match authority.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (authority, None),
        },
    };
    let bracketed = authority.starts_with('[');
    let legal = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-') || (bracketed && byte == b':');
    let host = host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase();
    if host.is_empty() || !host.bytes().all(legal) || host.split('.').any(str::is_empty) {
        return None;
    }
    if bracketed && host.parse::<Ipv6Addr>().is_err() {
        return None;
    }
    let port = match port {
        None => {
            if tls {
                443
            } else {
                80
            }
        }
        Some(digits) if digits.bytes().all(|byte| byte.is_ascii_digit()) => {
            digits.parse().ok().filter(|port| *port > 0)?
        }
        Some(_) => return None,
    };
    let target = after.split('#').next().unwrap_or_default();
    let slash = if target.starts_with('/') { "" } else { "/" };
    Some(Remote {
        tls,
        host,
        port,
        target: format!("{slash}{target}"),
    })
}
