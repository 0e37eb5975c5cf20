//! `coordinator certs`: the cluster's certificate authority, and one certificate for every process.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, Subcommand};
use protocol::ids::{NodeId, Role};
use runtime::authority::{CA_CERT_FILE, CertificateAuthority, IssuedPaths, VALIDITY};
use runtime::identity::{IdentityError, parse_role};

const SECONDS_PER_DAY: u64 = 24 * 3_600;
const DEFAULT_DAYS: u64 = VALIDITY.as_secs() / SECONDS_PER_DAY;

/// What to do about certificates.
#[derive(Clone, Debug, Subcommand)]
pub enum CertsCommand {
    /// Make a new certificate authority. Existing files are not replaced.
    Init(InitArgs),
    /// Issue a certificate for one process. Existing files are not replaced.
    Issue(IssueArgs),
    /// Renew a certificate: same name, same role. The process that uses it goes on, and shows it from then on.
    Renew(RenewArgs),
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
    /// How many days it is valid.
    #[arg(long, value_name = "DAYS", default_value_t = DEFAULT_DAYS, value_parser = days())]
    days: u64,
}

/// Arguments of `certs renew`.
#[derive(Args, Clone, Debug)]
pub struct RenewArgs {
    /// Where the authority, the certificate and its key are.
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
    /// Whose certificate.
    #[arg(long, value_name = "NAME")]
    node: String,
    /// The role that it must have; any by default.
    #[arg(long, value_parser = role)]
    role: Option<Role>,
    /// Make a new key too.
    #[arg(long)]
    new_key: bool,
    /// How many days it is valid from now on.
    #[arg(long, value_name = "DAYS", default_value_t = DEFAULT_DAYS, value_parser = days())]
    days: u64,
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
            Self::Issue(IssueArgs { dir, role, node, days }) => authority(dir, *days)?
                .issue_to(dir, *role, &NodeId(node.clone()))
                .map(said),
            Self::Renew(RenewArgs {
                dir,
                node,
                role,
                new_key,
                days,
            }) => authority(dir, *days)?
                .renew(dir, &NodeId(node.clone()), *role, *new_key)
                .map(said),
        }
    }
}

fn authority(dir: &Path, days: u64) -> Result<CertificateAuthority, IdentityError> {
    let validity = Duration::from_secs(days * SECONDS_PER_DAY);
    Ok(CertificateAuthority::load(dir)?.valid_for(validity))
}

fn said(paths: IssuedPaths) -> String {
    format!(
        "ca_cert_path = {:?}\ncert_path = {:?}\nkey_path = {:?}\n",
        paths.ca_cert, paths.cert, paths.key
    )
}

/// 1 to 100 years: what every TLS library can read.
fn days() -> clap::builder::RangedU64ValueParser {
    clap::value_parser!(u64).range(1..=36_500)
}

fn role(word: &str) -> Result<Role, String> {
    parse_role(word).ok_or_else(|| "must be coordinator, prefill, decode or both".to_owned())
}
