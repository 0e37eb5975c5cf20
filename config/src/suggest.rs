//! What a wrong name probably meant.

use crate::SECTIONS;
use crate::error::{ConfigError, Origin};
use crate::field::Section;

/// The error for a section that does not exist.
pub(crate) fn no_such_section(origin: Origin, name: &str) -> ConfigError {
    let names = || SECTIONS.iter().map(|section| section.name);
    let hint = nearest(name, names()).map_or_else(
        || format!("the sections are {}", names().collect::<Vec<_>>().join(", ")),
        |near| format!("did you mean `{near}`?"),
    );
    ConfigError::Unknown {
        origin,
        what: "section",
        name: name.to_owned(),
        hint,
    }
}

/// The error for a key that `section` does not have.
pub(crate) fn no_such_key(origin: Origin, section: &Section, name: &str) -> ConfigError {
    let hint = key_hint(section, name).map_or_else(
        || {
            format!(
                "the keys of [{}] are {}",
                section.name,
                field_names(section).collect::<Vec<_>>().join(", ")
            )
        },
        |(section, field)| format!("did you mean `{section}.{field}`?"),
    );
    ConfigError::Unknown {
        origin,
        what: "key",
        name: format!("{}.{name}", section.name),
        hint,
    }
}

/// The error for a variable that looks like a setting and is none. `rest` is its name without the prefix.
pub(crate) fn no_such_variable(name: &str, rest: &str) -> Option<ConfigError> {
    let lower = rest.to_lowercase();
    let (section, field) = match lower.split_once("__") {
        Some((section, field)) => (nearest(section, SECTIONS.iter().map(|known| known.name)), field),
        None => {
            let (first, field) = lower.split_once('_').unwrap_or((&lower, ""));
            // One slip of the finger at most: other programs may well use names of this kind.
            let close = |known: &str| strsim::damerau_levenshtein(known, first) <= 1;
            let section = SECTIONS.iter().map(|known| known.name).find(|known| close(known));
            section.is_some().then_some((section, field))?
        }
    };
    let known = section.and_then(|section| SECTIONS.iter().find(|known| known.name == section));
    let hint = match known {
        None => "variables are named BATON_SECTION__FIELD, for example BATON_ENGINE__THREADS".to_owned(),
        Some(section) => match key_hint(section, field) {
            Some((section, field)) => {
                format!(
                    "did you mean BATON_{}__{}?",
                    section.to_uppercase(),
                    field.to_uppercase()
                )
            }
            None => {
                let names: Vec<_> = field_names(section).map(str::to_uppercase).collect();
                format!(
                    "BATON_{}__ is followed by one of {}",
                    section.name.to_uppercase(),
                    names.join(", ")
                )
            }
        },
    };
    Some(ConfigError::Unknown {
        origin: Origin::Environment { name: name.to_owned() },
        what: "setting",
        name: name.to_owned(),
        hint,
    })
}

fn field_names(section: &Section) -> impl Iterator<Item = &'static str> {
    section.fields.iter().map(|field| field.name)
}

/// The key that was meant: the same word in another section, else a similar one in this section, else anywhere.
fn key_hint(section: &Section, name: &str) -> Option<(&'static str, &'static str)> {
    let owner = |field: &str| SECTIONS.iter().find(|section| section.field(field).is_some());
    if let Some(field) = section.field(name) {
        return Some((section.name, field.name));
    }
    if let Some((owner, field)) = owner(name).and_then(|owner| Some((owner, owner.field(name)?))) {
        return Some((owner.name, field.name));
    }
    if let Some(field) = nearest(name, field_names(section)) {
        return Some((section.name, field));
    }
    let field = nearest(name, SECTIONS.iter().flat_map(field_names))?;
    owner(field).map(|owner| (owner.name, field))
}

/// The most similar name, if one is similar at all: at most a third of the letters changed, or one is the other's part.
fn nearest(name: &str, known: impl Iterator<Item = &'static str>) -> Option<&'static str> {
    let name = name.to_lowercase().replace('-', "_");
    let distance = |known: &str| {
        // A missing unit or prefix (`idle_timeout`) is a likelier slip than its number of letters says.
        let part = name.len() >= 4 && (known.contains(&name) || name.contains(known));
        if part {
            1
        } else {
            strsim::damerau_levenshtein(known, &name)
        }
    };
    let limit = (name.chars().count() / 3).max(1);
    known
        .map(|known| (distance(known), known))
        .filter(|(distance, _)| *distance <= limit)
        .min_by_key(|(d, _)| *d)
        .map(|(_, known)| known)
}
