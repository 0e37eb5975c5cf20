//! Variables with names of their own: other programs know them too, and here they set what they set there.
//!
//! They are weaker than any variable `BATON_SECTION__FIELD`, and of several for the same field the last of this table holds.

/// A variable, the field that it sets, and the value that the field gets.
struct Foreign {
    name: &'static str,
    section: &'static str,
    field: &'static str,
    value: fn(&str) -> String,
}

const fn same(name: &'static str, section: &'static str, field: &'static str) -> Foreign {
    Foreign {
        name,
        section,
        field,
        value: str::to_owned,
    }
}

const fn cache(name: &'static str, value: fn(&str) -> String) -> Foreign {
    Foreign {
        name,
        section: "model",
        field: "hub_cache_dir",
        value,
    }
}

/// MindIE's, and those of the tools of the Hugging Face hub, with which the cache is shared.
const FOREIGN: &[Foreign] = &[
    same("ALLOWED_MEDIA_DOMAINS_ENV", "media", "allowed_domains"),
    cache("HOME", |home| format!("{home}/.cache/huggingface/hub")),
    cache("XDG_CACHE_HOME", |cache| format!("{cache}/huggingface/hub")),
    cache("HF_HOME", |home| format!("{home}/hub")),
    cache("HF_HUB_CACHE", str::to_owned),
    same("HF_ENDPOINT", "model", "hub_endpoint"),
    same("HF_TOKEN", "model", "hub_token"),
    same("HF_TOKEN_PATH", "model", "hub_token_file"),
    Foreign {
        name: "HF_HUB_OFFLINE",
        section: "model",
        field: "offline",
        value: truth,
    },
];

/// What those tools take as true; all else is false there, and left as it is here.
fn truth(word: &str) -> String {
    match word.to_ascii_lowercase().as_str() {
        "1" | "on" | "yes" | "true" => "true".to_owned(),
        "0" | "off" | "no" | "false" => "false".to_owned(),
        _ => word.to_owned(),
    }
}

/// Whether a variable of this name sets something here.
pub(crate) fn is_foreign(name: &str) -> bool {
    FOREIGN.iter().any(|known| known.name == name)
}

/// Whether a variable of this name, if it is not UTF-8, is no reason to refuse to start: it says where something may be found,
/// and every process has it.
pub(crate) fn is_of_everybody(name: &str) -> bool {
    matches!(name, "HOME" | "XDG_CACHE_HOME")
}

/// What the variables set, weakest first: name, section, field, value. Empty ones set nothing, as in those tools.
pub(crate) fn settings<'a>(
    lookup: impl Fn(&str) -> Option<&'a str>,
) -> impl Iterator<Item = (&'static str, &'static str, &'static str, String)> {
    FOREIGN.iter().filter_map(move |known| {
        let value = lookup(known.name).filter(|value| !value.is_empty())?;
        Some((known.name, known.section, known.field, (known.value)(value)))
    })
}
