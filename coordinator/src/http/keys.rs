//! Keys that clients and operators send.

use actix_web::http::header::{AUTHORIZATION, HeaderMap};
use config::Secret;

/// The key in `Authorization: Bearer KEY`.
pub fn bearer(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = value.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}

/// The number of a key among those that are known, from 1. Compares with every key in full, so that the time taken says
/// nothing about them but their lengths.
pub fn find(known: &[Secret], given: &str) -> Option<u32> {
    (1..).zip(known).fold(None, |found, (number, key)| {
        let (key, given) = (key.expose().as_bytes(), given.as_bytes());
        let differing = key
            .iter()
            .zip(given)
            .fold(0_u8, |differing, (a, b)| differing | (a ^ b));
        let same = differing == 0 && key.len() == given.len();
        if same { Some(number) } else { found }
    })
}

#[cfg(test)]
mod tests {
    use actix_web::http::header::HeaderValue;

    use super::*;

    #[test]
    fn keys_match_whole() {
        let keys = [Secret::new("0123456789abcdef"), Secret::new("fedcba9876543210")];
        for (given, known) in [
            ("0123456789abcdef", Some(1)),
            ("fedcba9876543210", Some(2)),
            ("0123456789abcde", None),
            ("0123456789abcdef0", None),
            ("", None),
        ] {
            assert_eq!(find(&keys, given), known, "{given}");
        }
    }

    #[test]
    fn the_scheme_is_bearer_in_any_case() {
        let of = |value: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(AUTHORIZATION, HeaderValue::from_static(value));
            bearer(&headers).map(str::to_owned)
        };
        assert_eq!(of("Bearer k").as_deref(), Some("k"));
        assert_eq!(of("bearer  k").as_deref(), Some("k"));
        assert_eq!(of("Bearer"), None);
        assert_eq!(of("Basic k"), None);
        assert_eq!(bearer(&HeaderMap::new()), None);
    }
}
