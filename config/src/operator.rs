//! How tools for operators find the admin plane: by arguments, by variables, or by the configuration of the coordinator itself.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;
use thiserror::Error;

use crate::{Config, ConfigArgs, ConfigError, Secret, load};

/// Variables that begin like settings and are none: a server that finds them set takes no notice.
pub(crate) const VARIABLES: [&str; 2] = ["BATON_ADMIN_URL", "BATON_ADMIN_TOKEN"];

/// Arguments of tools that talk to the admin plane, to be flattened into a program's own.
#[derive(Args, Clone, Debug, Default)]
pub struct OperatorArgs {
    /// Where the admin plane is [variable: BATON_ADMIN_URL]; without it, `admin.listen` of the configuration says so.
    #[arg(long, value_name = "URL")]
    pub admin: Option<String>,
    /// Token of the admin plane [variable: BATON_ADMIN_TOKEN]; without it, the first of `admin.tokens` of the configuration.
    /// Other users of a machine see arguments: the variable is the better place.
    #[arg(long, value_name = "TOKEN", value_parser = secret)]
    pub token: Option<Secret>,
    /// The coordinator's configuration file: its admin.listen and admin.tokens are used, whatever the variables say.
    #[arg(long, value_name = "PATH")]
    pub config: Option<PathBuf>,
    /// One setting of the configuration, stronger than file and environment; may be repeated.
    #[arg(long = "set", value_name = "SECTION.FIELD=VALUE")]
    pub set: Vec<String>,
}

/// Where the admin plane is, and what opens it.
#[derive(Clone, Debug)]
pub struct AdminTarget {
    /// `http://host:port`, without a path.
    pub url: String,
    /// The token to send.
    pub token: Secret,
}

/// Why it is not known where the admin plane is.
#[derive(Debug, Error)]
pub enum OperatorError {
    /// The configuration is refused.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// There is no address.
    #[error(
        "where is the admin plane? Give --admin http://HOST:PORT (or {}), or --config with the coordinator's file, in which \
         admin.listen is set",
        VARIABLES[0]
    )]
    NoAddress,
    /// There is no token.
    #[error("a token is needed: give {} or --token, or --config with the coordinator's file", VARIABLES[1])]
    NoToken,
    /// The address is not one.
    #[error("--admin {given:?} is not valid; expected http://HOST:PORT")]
    Address {
        /// What was given.
        given: String,
    },
}

impl OperatorArgs {
    /// Where to ask, and with which token. The configuration is read only for what is not given, by an argument, or by a
    /// variable where no configuration is named: one that is exported for another cluster must not win over it.
    ///
    /// # Errors
    /// See [`OperatorError`].
    #[allow(clippy::disallowed_methods, reason = "this crate is who reads the environment")]
    pub fn target(&self) -> Result<AdminTarget, OperatorError> {
        let is_named = self.config.is_some() || !self.set.is_empty();
        let variable = |name: &str| {
            let value = std::env::var(name).ok();
            value.filter(|value| !is_named && !value.is_empty())
        };
        let admin = self.admin.clone().or_else(|| variable(VARIABLES[0]));
        let given = self.token.clone();
        let token = given.or_else(|| variable(VARIABLES[1]).map(|token| Secret::new(&token)));
        let config = if admin.is_some() && token.is_some() {
            Config::default()
        } else {
            load(&ConfigArgs {
                config: self.config.clone(),
                set: self.set.clone(),
                ..ConfigArgs::default()
            })?
        };
        let url = match &admin {
            Some(given) => address(given)?,
            None => listening(&config.admin.listen).ok_or(OperatorError::NoAddress)?,
        };
        let token = token.as_ref().or(config.admin.tokens.first());
        let token = token.filter(|token| !token.expose().is_empty());
        Ok(AdminTarget {
            url,
            token: token.cloned().ok_or(OperatorError::NoToken)?,
        })
    }
}

fn secret(text: &str) -> Result<Secret, Infallible> {
    Ok(Secret::new(text))
}

/// An address as it was given, without what may stand behind host and port.
fn address(given: &str) -> Result<String, OperatorError> {
    let refused = || OperatorError::Address {
        given: given.chars().take(200).collect(),
    };
    // The admin plane speaks no TLS: a token would not be safer for a scheme that says so.
    let rest = given.strip_prefix("http://").ok_or_else(refused)?;
    let host = rest
        .strip_suffix('/')
        .or(rest.strip_suffix("/dashboard"))
        .unwrap_or(rest);
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b".-_:[]".contains(&byte);
    if host.is_empty() || !host.bytes().all(plain) {
        return Err(refused());
    }
    Ok(format!("http://{host}"))
}

/// The address of who listens at `listen`, seen from the same machine.
fn listening(listen: &str) -> Option<String> {
    if listen.is_empty() {
        return None;
    }
    // A name is one that resolves here.
    let Ok(mut address) = listen.parse::<SocketAddr>() else {
        return Some(format!("http://{listen}"));
    };
    if address.ip().is_unspecified() {
        address.set_ip(match address {
            SocketAddr::V4(_) => std::net::Ipv4Addr::LOCALHOST.into(),
            SocketAddr::V6(_) => std::net::Ipv6Addr::LOCALHOST.into(),
        });
    }
    Some(format!("http://{address}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_host_and_a_port() {
        for (given, taken) in [
            ("http://127.0.0.1:7700", "http://127.0.0.1:7700"),
            ("http://c0.example:7700/", "http://c0.example:7700"),
            ("http://[::1]:7700/dashboard", "http://[::1]:7700"),
        ] {
            assert_eq!(address(given).ok().as_deref(), Some(taken));
        }
        for wrong in [
            "",
            "127.0.0.1:7700",
            "https://c0:7700",
            "http://",
            "http://a/b",
            "http://u:p@c0:1",
            "http://a?b",
        ] {
            let refused = address(wrong).map_err(|error| error.to_string());
            assert!(
                refused.is_err_and(|text| text.contains("expected http://HOST:PORT")),
                "{wrong}"
            );
        }
    }

    #[test]
    fn who_listens_everywhere_is_asked_here() {
        assert_eq!(listening("0.0.0.0:7700").as_deref(), Some("http://127.0.0.1:7700"));
        assert_eq!(listening("[::]:7700").as_deref(), Some("http://[::1]:7700"));
        assert_eq!(listening("10.0.0.5:7700").as_deref(), Some("http://10.0.0.5:7700"));
        assert_eq!(listening("localhost:7700").as_deref(), Some("http://localhost:7700"));
        assert_eq!(listening(""), None);
    }
}
