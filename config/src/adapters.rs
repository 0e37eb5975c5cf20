//! Adapters, written as `name=path`.

use crate::ModelConfig;

/// The name and the path of an adapter; `None` if they are not legal.
pub(crate) fn adapter(text: &str) -> Option<(&str, &str)> {
    let (name, path) = text.split_once('=')?;
    let legal = |b: u8| b.is_ascii_alphanumeric() || b"._-/".contains(&b);
    let named = (1..=256).contains(&name.len()) && name.bytes().all(legal) && name != "None";
    (named && !path.trim().is_empty()).then_some((name, path))
}

impl ModelConfig {
    /// The adapters' names, and the paths of their directories.
    pub fn named_adapters(&self) -> impl Iterator<Item = (&str, &str)> {
        self.adapters.iter().filter_map(|text| adapter(text))
    }
}

#[cfg(test)]
mod tests {
    use super::adapter;

    #[test]
    fn adapters_have_a_name_and_a_path() {
        assert_eq!(adapter("a=/x/y"), Some(("a", "/x/y")));
        assert_eq!(adapter("org/a-b_c.1=x=y"), Some(("org/a-b_c.1", "x=y")));
        for wrong in [
            "",
            "a",
            "a=",
            "a= ",
            "=x",
            "None=x",
            "a b=x",
            "ä=x",
            &format!("{}=x", "a".repeat(257)),
        ] {
            assert_eq!(adapter(wrong), None, "{wrong}");
        }
    }
}
