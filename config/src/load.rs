//! Reads the layers, strongest last: defaults, file, environment, `--set`.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use toml::Value;
use toml::de::DeTable;

use crate::args::ConfigArgs;
use crate::check::check_together;
use crate::error::{ConfigError, Origin, Setting};
use crate::field::{Field, Section};
use crate::foreign;
use crate::operator::VARIABLES;
use crate::suggest::{no_such_key, no_such_section, no_such_variable};
use crate::value::{self, Refused};
use crate::{Config, SECTIONS};

/// Largest configuration file that is read, in bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// First part of the name of every variable that sets something.
const PREFIX: &str = "BATON_";

/// What a configuration is read from, beside the environment.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// A file's name, as errors show it, and its text.
    pub file: Option<(String, String)>,
    /// `section.field=value` arguments; later ones win.
    pub set: Vec<String>,
}

/// The configuration that the arguments and this process's environment describe.
///
/// # Errors
/// The first thing that is wrong, in the order file, environment, arguments, contradictions.
pub fn load(args: &ConfigArgs) -> Result<Config, ConfigError> {
    let file = args.config.as_deref().map(read_file).transpose()?;
    let mut env = Vec::new();
    for (name, value) in std::env::vars_os() {
        let Some(name) = name
            .to_str()
            .filter(|name| name.starts_with(PREFIX) || foreign::is_foreign(name))
        else {
            continue;
        };
        if value.to_str().is_none() && foreign::is_of_everybody(name) {
            continue;
        }
        let value = value.into_string().map_err(|_| ConfigError::Value {
            setting: Box::new(Setting {
                origin: Origin::Environment { name: name.to_owned() },
                key: name.to_owned(),
                value: "(not UTF-8)".to_owned(),
            }),
            expected: "UTF-8".to_owned(),
        })?;
        env.push((name.to_owned(), value));
    }
    load_from(
        &Sources {
            file,
            set: args.set.clone(),
        },
        env,
    )
}

/// The configuration that `sources` and the variables in `env` describe. Reads nothing else.
///
/// # Errors
/// As [`load`].
pub fn load_from(sources: &Sources, env: impl IntoIterator<Item = (String, String)>) -> Result<Config, ConfigError> {
    let mut layers = Layers::default();
    if let Some((path, text)) = &sources.file {
        layers.read_toml(path, text)?;
    }
    // Sorted: of several wrong variables the same one is reported every time.
    let variables: BTreeMap<String, String> = env.into_iter().collect();
    for (name, section, field, value) in foreign::settings(|name| variables.get(name).map(String::as_str)) {
        layers.read_foreign(name, (section, field), &value)?;
    }
    for (name, value) in &variables {
        layers.read_variable(name, value)?;
    }
    for argument in &sources.set {
        layers.read_argument(argument)?;
    }
    layers.into_config()
}

fn read_file(path: &Path) -> Result<(String, String), ConfigError> {
    let shown = path.display().to_string();
    let unreadable = |reason: String| ConfigError::Unreadable {
        path: shown.clone(),
        reason,
        max_bytes: MAX_FILE_BYTES,
    };
    let mut text = String::new();
    let file = File::open(path).map_err(|error| unreadable(error.to_string()))?;
    let read = file.take(MAX_FILE_BYTES + 1).read_to_string(&mut text);
    let bytes = read.map_err(|error| unreadable(error.to_string()))?;
    if bytes as u64 > MAX_FILE_BYTES {
        return Err(unreadable("file too large".to_owned()));
    }
    Ok((shown, text))
}

/// Which values were given, and where.
#[derive(Default)]
pub(crate) struct Layers {
    given: BTreeMap<(&'static str, &'static str), (Value, Origin)>,
}

impl Layers {
    /// Where the value of `section.field` came from.
    pub(crate) fn origin(&self, section: &'static str, field: &'static str) -> Origin {
        self.given
            .get(&(section, field))
            .map_or(Origin::Default, |(_, origin)| origin.clone())
    }

    fn read_toml(&mut self, path: &str, text: &str) -> Result<(), ConfigError> {
        let at = |start: usize| {
            let before = text.as_bytes().iter().take(start);
            Origin::File {
                path: path.to_owned(),
                line: 1 + before.filter(|byte| **byte == b'\n').count(),
            }
        };
        let document = DeTable::parse(text).map_err(|error| ConfigError::Syntax {
            origin: at(error.span().map_or(0, |span| span.start)),
            reason: error.message().trim().replace('\n', "; "),
        })?;
        for (section_name, body) in document.get_ref() {
            let origin = at(section_name.span().start);
            let section = find_section(section_name.get_ref())
                .ok_or_else(|| no_such_section(origin.clone(), section_name.get_ref()))?;
            let table = body.get_ref().as_table().ok_or_else(|| ConfigError::Value {
                setting: Box::new(Setting {
                    origin,
                    key: section.name.to_owned(),
                    value: format!("({})", body.get_ref().type_str()),
                }),
                expected: format!("a section: a line [{}] and fields below it", section.name),
            })?;
            for (key, value) in table {
                let origin = at(key.span().start);
                let field = section
                    .field(key.get_ref())
                    .ok_or_else(|| no_such_key(origin.clone(), section, key.get_ref()))?;
                self.put(section, field, origin, value::from_file(field.kind, value.get_ref()))?;
            }
        }
        Ok(())
    }

    fn read_variable(&mut self, name: &str, text: &str) -> Result<(), ConfigError> {
        let Some(rest) = name.strip_prefix(PREFIX).filter(|_| !VARIABLES.contains(&name)) else {
            return Ok(());
        };
        let found = rest.split_once("__").and_then(|(section, field)| {
            let section = SECTIONS.iter().find(|known| known.name.to_uppercase() == section)?;
            section
                .fields
                .iter()
                .find(|known| known.name.to_uppercase() == field)
                .map(|field| (section, field))
        });
        match found {
            Some((section, field)) => {
                let origin = Origin::Environment { name: name.to_owned() };
                self.put(section, field, origin, value::from_text(field.kind, text))
            }
            // Variables that do not look like a setting belong to somebody else.
            None => no_such_variable(name, rest).map_or(Ok(()), Err),
        }
    }

    /// A variable that other programs know, and the field that it sets here.
    fn read_foreign(&mut self, name: &str, (section, field): (&str, &str), value: &str) -> Result<(), ConfigError> {
        let section = find_section(section).and_then(|section| Some((section, section.field(field)?)));
        let (section, field) = section.ok_or_else(|| ConfigError::Internal {
            reason: format!("{name} sets a field that does not exist"),
        })?;
        let origin = Origin::Environment { name: name.to_owned() };
        self.put(section, field, origin, value::from_text(field.kind, value))
    }

    fn read_argument(&mut self, argument: &str) -> Result<(), ConfigError> {
        let (key, text) = argument.split_once('=').unwrap_or((argument, ""));
        let key = key.trim();
        let parts = key.split_once('.').filter(|_| argument.contains('='));
        let (section_name, field_name) = parts.ok_or_else(|| ConfigError::Argument {
            argument: key.to_owned(),
        })?;
        let origin = Origin::Argument { key: key.to_owned() };
        let section = find_section(section_name).ok_or_else(|| no_such_section(origin.clone(), section_name))?;
        let field = section
            .field(field_name)
            .ok_or_else(|| no_such_key(origin.clone(), section, field_name))?;
        self.put(section, field, origin, value::from_text(field.kind, text))
    }

    fn put(
        &mut self,
        section: &'static Section,
        field: &'static Field,
        origin: Origin,
        value: Result<Value, Refused>,
    ) -> Result<(), ConfigError> {
        let value = value.map_err(|refused| ConfigError::Value {
            setting: Box::new(Setting {
                origin: origin.clone(),
                key: format!("{}.{}", section.name, field.name),
                value: refused.value,
            }),
            expected: refused.expected,
        })?;
        self.given.insert((section.name, field.name), (value, origin));
        Ok(())
    }

    fn into_config(mut self) -> Result<Config, ConfigError> {
        self.settle_pool_size();
        self.settle_token();
        let mut sections = toml::Table::new();
        for ((section, field), (value, _)) in &self.given {
            let table = sections
                .entry(*section)
                .or_insert_with(|| Value::Table(toml::Table::new()));
            if let Value::Table(table) = table {
                table.insert((*field).to_owned(), value.clone());
            }
        }
        let config: Config = sections.try_into().map_err(|error| ConfigError::Internal {
            reason: format!("{error}"),
        })?;
        check_together(&config, &self)?;
        Ok(config)
    }
}

impl Layers {
    /// The KV pool's size has two fields. Where a stronger layer gives it in tokens, what a weaker one says in bytes is
    /// overridden, as another number of tokens would be. (The other way round bytes hold anyway.)
    fn settle_pool_size(&mut self) {
        let rank = |field| self.origin("engine", field).rank();
        if rank("kv_pool_tokens") > rank("kv_pool_bytes") {
            self.given.remove(&("engine", "kv_pool_bytes"));
        }
    }

    /// The hub's token has two fields, too: a file that a stronger layer names holds. Of one layer the token itself does.
    fn settle_token(&mut self) {
        let rank = |field| self.origin("model", field).rank();
        if rank("hub_token_file") > rank("hub_token") {
            self.given.remove(&("model", "hub_token"));
        } else {
            self.given.remove(&("model", "hub_token_file"));
        }
    }
}

fn find_section(name: &str) -> Option<&'static Section> {
    SECTIONS.iter().find(|section| section.name == name)
}
