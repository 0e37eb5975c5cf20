//! The files that are derived from the field listing or must agree with it.

use std::fs;
use std::path::{Path, PathBuf};

use config::{Config, Kind, SECTIONS, Sources, Text, load_from};

fn here(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn load_profile(name: &str) -> Config {
    let path = here("profiles").join(name);
    let text = fs::read_to_string(&path).unwrap();
    let sources = Sources {
        file: Some((path.display().to_string(), text)),
        set: Vec::new(),
    };
    load_from(&sources, []).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn the_local_profile_uses_large_datagrams_without_gso() {
    let config = load_profile("local.toml");
    assert_eq!(config.transfer.datagram_bytes, 65_000);
    assert!(!config.transfer.gso);
    assert!(
        config.transfer.initial_window_bytes >= 14_720,
        "datagrams above 14,720 bytes need a raised first window"
    );
}

#[test]
fn the_cluster_profile_names_hosts_and_fits_ethernet() {
    let config = load_profile("cluster-example.toml");
    assert_eq!(config.transfer.datagram_bytes, 1_452);
    assert!(config.transfer.gso);
    assert_eq!(config.node.coordinators, ["coordinator-0.baton.example:7600"]);
    assert!(!config.cluster.key_path.is_empty());
}

#[test]
fn every_profile_loads() {
    let mut count = 0;
    for entry in fs::read_dir(here("profiles")).unwrap() {
        load_profile(entry.unwrap().file_name().to_str().unwrap());
        count += 1;
    }
    assert!(count >= 2, "only {count} profiles found");
}

#[test]
fn the_reference_is_the_one_the_code_writes() {
    let committed = fs::read_to_string(here("../docs/configuration.md")).unwrap();
    assert!(
        committed == config::reference().unwrap(),
        "docs/configuration.md is out of date; run\n  \
         cargo run --release -p config --example reference > docs/configuration.md"
    );
}

/// A name that ends in a quantity states its unit.
#[test]
fn every_field_is_documented_in_one_line_with_its_unit() {
    let units = [
        ("_ms", "in milliseconds"),
        ("_bytes", "in bytes"),
        ("_chars", "in Unicode characters"),
    ];
    for section in SECTIONS {
        assert!(!section.doc.trim().is_empty(), "[{}]", section.name);
        for field in section.fields {
            let name = format!("{}.{}", section.name, field.name);
            assert!(
                field.doc.trim().ends_with('.') && !field.doc.contains('\n'),
                "{name}: {}",
                field.doc
            );
            for (suffix, unit) in units {
                assert_eq!(
                    field.name.ends_with(suffix),
                    field.doc.contains(unit),
                    "{name}: {}",
                    field.doc
                );
            }
        }
    }
}

#[test]
fn every_default_is_legal_for_its_own_field() {
    let text = Config::default().to_toml().unwrap();
    let config = load_from(
        &Sources {
            file: Some(("printed.toml".into(), text)),
            set: Vec::new(),
        },
        [],
    );
    assert_eq!(config.unwrap(), Config::default());
}

/// The field table and the structs agree: every field can be set, and nothing else changes.
#[test]
fn every_field_can_be_set_to_another_value_than_its_default() {
    let table = |config: &Config| toml::Table::try_from(config).unwrap();
    let defaults = table(&Config::default());
    for section in SECTIONS {
        for field in section.fields {
            let key = format!("{}.{}", section.name, field.name);
            let default = &defaults[section.name][field.name];
            let mut set = vec![format!("{key}={}", other_value(field.kind, default))];
            if section.name == "cluster" && field.name.ends_with("_path") {
                // The three paths are given together or not at all.
                set = ["ca_cert_path", "cert_path", "key_path"]
                    .map(|name| format!("cluster.{name}=other"))
                    .to_vec();
            }
            if field.name.starts_with("tls_") {
                set = ["tls_cert_path", "tls_key_path"]
                    .map(|name| format!("coordinator.{name}=other"))
                    .to_vec();
            }
            if key == "admin.listen" {
                set.push("admin.tokens=operators-only-0123456789".to_owned());
            }
            let together: &[&str] = match (section.name, field.name) {
                ("discovery", "method") => &["method=dns", "dns_names=other:1"],
                ("discovery", "etcd_cert_path" | "etcd_key_path") => &["etcd_cert_path=other", "etcd_key_path=other"],
                ("discovery", "etcd_user" | "etcd_password_path") => &["etcd_user=other", "etcd_password_path=other"],
                _ => &[],
            };
            if !together.is_empty() {
                set = together.iter().map(|setting| format!("discovery.{setting}")).collect();
            }
            let given = set.len();
            let config = load_from(&Sources { file: None, set }, []).unwrap_or_else(|error| panic!("{error}"));
            let table = table(&config);
            assert_ne!(&table[section.name][field.name], default, "{key} did not arrive");
            let changed = SECTIONS
                .iter()
                .flat_map(|section| section.fields.iter().map(move |field| (section, field)));
            let changed = changed
                .filter(|(section, field)| table[section.name][field.name] != defaults[section.name][field.name]);
            assert_eq!(changed.count(), given, "{key} changed another field");
        }
    }
}

/// A legal value that is not the default.
fn other_value(kind: Kind, default: &toml::Value) -> String {
    match kind {
        Kind::Bool => (!default.as_bool().unwrap()).to_string(),
        // Twice the default keeps every relation between fields.
        Kind::Int { max, .. } => {
            let default = default.as_integer().unwrap();
            let twice = (2 * default).max(1);
            (if twice <= max { twice } else { default - 1 }).to_string()
        }
        Kind::Choice(words) => (*words.iter().find(|word| Some(**word) != default.as_str()).unwrap()).to_owned(),
        Kind::Text(rule) | Kind::List { item: rule, .. } => match rule {
            Text::Any | Text::NonEmpty | Text::NodeName | Text::ModelPath | Text::Token => "other",
            Text::Url => "https://other.example/hub",
            Text::Cores => "5",
            Text::Adapter => "other=path",
            Text::BindAddress | Text::OptionalBindAddress => "[::1]:7999",
            Text::DialAddress | Text::OptionalDialAddress => "other.example:7999",
            Text::HttpUrl | Text::CollectorUrl => "http://other.example:2379",
            Text::Secret => "0123456789abcdef",
        }
        .to_owned(),
    }
}
