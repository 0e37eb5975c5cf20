//! `coordinator certs`: the cluster's certificate authority, and one certificate for every process.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use protocol::ids::{NodeId, Role};
use runtime::authority::{CA_CERT_FILE, CertificateAuthority};
use runtime::identity::{IdentityError, parse_role};

/// What to do about certificates.
#[derive(Clone, Debug, Subcommand)]
pub enum CertsCommand {
    /// Make a new certificate authority. Existing files are not replaced.
    Init(InitArgs),
    /// Issue a certificate for one process. Existing files are not replaced.
    Issue(IssueArgs),
}

/// Arguments of `certs init`.
#[derive(Args, Clone, Debug)]
pub struct InitArgs {
    /// Where the authority's certificate and key are written; created if it is not there.
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
}

/// Arguments of `certs issue`.
#[derive(Args, Clone, Debug)]
pub struct IssueArgs {
    /// Where the authority is, and where the certificate and its key are written.
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
    /// What the process does: coordinator, prefill, decode, or both (a node that may be either).
    #[arg(long, value_parser = role)]
    role: Role,
    /// Its name, unique in the cluster.
    #[arg(long, value_name = "NAME")]
    node: String,
}

impl CertsCommand {
    /// Does it; what to tell whoever asked: the settings under `[cluster]` that use what was written.
    ///
    /// # Errors
    /// A file that cannot be read or written, a file that is there already, or a name that is none.
    pub fn run(&self) -> Result<String, IdentityError> {
        match self {
            Self::Init(InitArgs { dir }) => {
                CertificateAuthority::create(dir)?;
                Ok(format!("ca_cert_path = {:?}\n", dir.join(CA_CERT_FILE)))
            }
            Self::Issue(IssueArgs { dir, role, node }) => {
                let paths = CertificateAuthority::load(dir)?.issue_to(dir, *role, &NodeId(node.clone()))?;
                Ok(format!(
                    "ca_cert_path = {:?}\ncert_path = {:?}\nkey_path = {:?}\n",
                    paths.ca_cert, paths.cert, paths.key
                ))
            }
        }
    }
}

fn role(word: &str) -> Result<Role, String> {
    parse_role(word).ok_or_else(|| "must be coordinator, prefill, decode or both".to_owned())
}
