//! Command-line arguments that every process shares.

use std::path::PathBuf;

use clap::Args;

use crate::{Config, ConfigError};

/// Arguments about configuration, to be flattened into a program's own.
#[derive(Args, Clone, Debug, Default)]
pub struct ConfigArgs {
    /// TOML file with settings.
    #[arg(long, value_name = "PATH")]
    pub config: Option<PathBuf>,
    /// One setting, stronger than file and environment; may be repeated.
    #[arg(long = "set", value_name = "SECTION.FIELD=VALUE")]
    pub set: Vec<String>,
    /// Print the resulting configuration as TOML and exit.
    #[arg(long)]
    pub print_config: bool,
    /// Check the configuration and exit.
    #[arg(long)]
    pub check: bool,
}

impl ConfigArgs {
    /// What to print before exiting, where the arguments ask about the configuration instead of a run.
    ///
    /// # Errors
    /// As [`Config::to_toml`].
    pub fn answer(&self, config: &Config) -> Result<Option<String>, ConfigError> {
        if self.print_config {
            return config.to_toml().map(Some);
        }
        Ok(self.check.then(|| "the configuration is valid\n".to_owned()))
    }
}
