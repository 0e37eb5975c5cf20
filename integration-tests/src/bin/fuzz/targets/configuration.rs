//! A configuration file, then variables and arguments: `file NUL NAME=value NUL section.field=value ...`.

use config::{Sources, load_from};

use super::Target;
use crate::corpus::shape;

pub(crate) struct Configuration;

impl Target for Configuration {
    fn name(&self) -> &'static str {
        "config"
    }

    fn seeds(&self) -> Vec<Vec<u8>> {
        let mut seeds = vec![
            Vec::from("[engine]\nthreads = 2\n\0BATON_MODEL__COMPUTE=precise\0limits.max_seq_len=16_384"),
            Vec::from("\0BATON_NODE__COORDINATORS=a:1,b:2\0coordinator.api_keys=[\"0123456789abcdef\"]"),
            Vec::from("[model]\nadapters = ['a=b', \"c=d\"]\n[engine]\ncores = \"0,2-3\"\nthreads = 3\n"),
        ];
        seeds.extend(config::Config::default().to_toml().ok().map(String::into_bytes));
        seeds
    }

    fn run(&self, input: &[u8]) -> Result<String, String> {
        let text = String::from_utf8_lossy(input);
        let mut parts = text.split('\0');
        let file = parts.next().unwrap_or_default().to_owned();
        let (mut variables, mut set) = (Vec::new(), Vec::new());
        for part in parts {
            match part.split_once('=') {
                Some((name, value)) if name.starts_with("BATON_") => {
                    variables.push((name.to_owned(), value.to_owned()));
                }
                _ => set.push(part.to_owned()),
            }
        }
        let sources = Sources {
            file: Some(("baton.toml".to_owned(), file)),
            set,
        };
        match load_from(&sources, variables) {
            Err(error) => {
                let said = error.to_string();
                if said.is_empty() || said.contains('\n') || said.len() > 4_000 {
                    return Err(format!("an error is one short line, not {said:?}"));
                }
                Ok(shape(&said))
            }
            Ok(config) => {
                // What is printed loads again as the same, secrets aside.
                let printed = config.to_toml().map_err(|error| error.to_string())?;
                if !config.coordinator.api_keys.is_empty() || !config.admin.tokens.is_empty() {
                    return Ok("has secrets".to_owned());
                }
                let again = Sources {
                    file: Some(("printed.toml".to_owned(), printed)),
                    set: Vec::new(),
                };
                match load_from(&again, []) {
                    Ok(same) if same == config => Ok(shape(&format!("{config:?}"))),
                    Ok(_) => Err("the printed configuration is another one".to_owned()),
                    Err(error) => Err(format!("the printed configuration is refused: {error}")),
                }
            }
        }
    }
}
