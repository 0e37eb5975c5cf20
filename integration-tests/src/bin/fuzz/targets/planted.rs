//! Errors of every kind, planted so that a test sees whether they are found.

use super::Target;

pub(crate) struct Planted;

impl Target for Planted {
    fn name(&self) -> &'static str {
        "planted"
    }

    fn seeds(&self) -> Vec<Vec<u8>> {
        vec![b"p 7".to_vec(), b"m 8".to_vec(), b"b 1".to_vec()]
    }

    /// `p`, `m`, `b`, `h`, `k` and a number: a panic, memory, a broken promise, a hang, a death, from 1,000,000 on.
    fn run(&self, input: &[u8]) -> Result<String, String> {
        let text = std::str::from_utf8(input).map_err(|_| String::new());
        let Some((kind, number)) = text.as_deref().ok().and_then(|text| text.split_once(' ')) else {
            return Ok("no word and number".to_owned());
        };
        if !["p", "m", "b", "h", "k"].contains(&kind) {
            return Ok("another word".to_owned());
        }
        let number: u64 = match number.parse() {
            Ok(number) => number,
            Err(_) => return Ok(format!("{kind} and no number")),
        };
        if number < 1_000_000 {
            return Ok(format!("{kind}, {} digits", number.to_string().len()));
        }
        match kind {
            "p" => panic!("planted"),
            "m" => Ok(std::hint::black_box(vec![1_u8; 64 << 20]).len().to_string()),
            "b" => Err("planted promise".to_owned()),
            // These end the run: no mutation comes upon them by chance.
            "k" if number == 1_000_000 => std::process::abort(),
            "h" if number == 1_000_000 => loop {
                std::hint::spin_loop();
            },
            _ => Ok("another word".to_owned()),
        }
    }
}
