//! From an identity to what links are dialled and accepted with.

use std::sync::Arc;

use quinn::TransportConfig;
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};

use super::{Alpn, LinkError, accepted_roles, settings};
use crate::identity::{Identity, IdentityError};

/// What links of each plane are dialled with.
pub(super) struct Dialling {
    control: quinn::ClientConfig,
    kv: quinn::ClientConfig,
}

impl Dialling {
    pub(super) fn new(identity: &Identity, transport: &Arc<TransportConfig>) -> Result<Self, LinkError> {
        let client = |alpn: Alpn| -> Result<_, LinkError> {
            let tls = QuicClientConfig::try_from(identity.client_tls(alpn.as_bytes())?).map_err(no_initial_suite)?;
            let mut config = quinn::ClientConfig::new(Arc::new(tls));
            config.transport_config(Arc::clone(transport));
            Ok(config)
        };
        Ok(Self {
            control: client(Alpn::Control)?,
            kv: client(Alpn::Kv)?,
        })
    }

    pub(super) fn of(&self, alpn: Alpn) -> quinn::ClientConfig {
        match alpn {
            Alpn::Control => self.control.clone(),
            Alpn::Kv => self.kv.clone(),
        }
    }
}

/// What links are accepted with; `None` if the role offers no plane.
pub(super) fn listening(
    identity: &Identity,
    transport: &Arc<TransportConfig>,
) -> Result<Option<quinn::ServerConfig>, LinkError> {
    let own = identity.peer().role;
    let planes: Vec<_> = Alpn::ALL
        .into_iter()
        .filter(|alpn| !accepted_roles(own, *alpn).is_empty())
        .collect();
    if planes.is_empty() {
        return Ok(None);
    }
    let tls = identity.server_tls(planes.iter().map(|alpn| alpn.as_bytes().to_vec()).collect())?;
    let tls = QuicServerConfig::try_from(tls).map_err(no_initial_suite)?;
    Ok(Some(settings::server(tls, transport)))
}

fn no_initial_suite(error: quinn::crypto::rustls::NoInitialCipherSuite) -> LinkError {
    LinkError::Identity(IdentityError::Content {
        what: "TLS provider".to_owned(),
        reason: error.to_string(),
    })
}
