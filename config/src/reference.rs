//! The configuration reference, written from the same listing as the code.

use std::fmt::Write as _;

use toml::Value;

use crate::field::{Field, Kind, Section, Text};
use crate::{Config, ConfigError, SECTIONS};

const INTRODUCTION: &str = "\
# Configuration

<!-- Written by `cargo run --release -p config --example reference`; a test compares. Change config/src/sections.rs. -->

All three kinds of process read the same TOML file and use what concerns them. The layers, strongest last:

1. the defaults below,
2. the file given by `--config PATH`,
3. variables `BATON_SECTION__FIELD`, for example `BATON_ENGINE__THREADS=2`,
4. arguments `--set section.field=value`, for example `--set engine.threads=2`; the last of several wins.

In variables and arguments a list is separated by commas (`a:7600,b:7600`) or written as in TOML (`[\"a:7600\"]`).
Unknown names, wrong types, values out of range and values that contradict each other are errors that name the file
and line, the variable or the argument. `--check` stops after that; `--print-config` prints the result, secrets hidden.
Paths are relative to the working directory.

";

/// The reference as Markdown: one table a section, with each field's name, default, legal values and meaning.
///
/// # Errors
/// None in practice: every field has a TOML form.
pub fn reference() -> Result<String, ConfigError> {
    let internal = |reason: String| ConfigError::Internal { reason };
    let defaults = toml::Table::try_from(Config::default()).map_err(|error| internal(error.to_string()))?;
    let mut text = INTRODUCTION.to_owned();
    for (number, section) in SECTIONS.iter().enumerate() {
        if number > 0 {
            text.push('\n');
        }
        write_section(&mut text, section, &defaults).map_err(|error| internal(error.to_string()))?;
    }
    Ok(text)
}

fn write_section(text: &mut String, section: &Section, defaults: &toml::Table) -> std::fmt::Result {
    writeln!(text, "## [{}]\n\n{}\n", section.name, section.doc.trim())?;
    writeln!(text, "| field | default | values | meaning |\n|---|---|---|---|")?;
    for field in section.fields {
        let default = defaults.get(section.name).and_then(|values| values.get(field.name));
        let default = default.map_or_else(String::new, Value::to_string);
        writeln!(
            text,
            "| `{}` | `{default}` | {} | {} |",
            field.name,
            values(field),
            field.doc.trim()
        )?;
    }
    Ok(())
}

/// The legal values, in few words.
fn values(field: &Field) -> String {
    match field.kind {
        Kind::Bool => "true, false".to_owned(),
        Kind::Int { min, max } => format!("{min} to {max}"),
        Kind::Text(rule) => rule_name(rule).to_owned(),
        Kind::List { item, min_items: 0 } => format!("list of {}", rule_name(item)),
        Kind::List { item, min_items } => format!("list of {}, at least {min_items}", rule_name(item)),
        Kind::Choice(words) => words.join(", "),
    }
}

fn rule_name(rule: Text) -> &'static str {
    match rule {
        Text::Any | Text::NonEmpty => "text",
        Text::BindAddress => "IP:port",
        Text::OptionalBindAddress => "IP:port or empty",
        Text::DialAddress => "host:port",
        Text::OptionalDialAddress => "host:port or empty",
        Text::HttpUrl => "http://host:port or https://host:port",
        Text::ModelPath => "path or hf://org/name",
        Text::Url => "http://host or https://host",
        Text::CollectorUrl => "http://host:port or empty",
        Text::NodeName => "name or empty",
        Text::Adapter => "name=path",
        Text::Cores => "cores such as 0,2-3, or empty",
        Text::Token => "secret or empty",
        Text::Secret => "secrets of 16 visible ASCII characters or more",
    }
}
