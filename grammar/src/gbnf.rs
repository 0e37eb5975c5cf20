//! llama.cpp's GBNF, which vLLM's clients use too, in Lark's notation.
//!
//! GBNF: `name ::= alternatives`, with strings, character classes, `.`, groups, `* + ? {m,n}`, comments behind `#`; the
//! first rule is called `root`. Names there may have any letters and `-`; Lark gives upper and lower case a meaning.

use std::collections::HashMap;
use std::iter::Peekable;
use std::str::Chars;

/// A piece of a grammar's text.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Token {
    Name(String),
    Defines,
    Literal(String),
    /// A class as a regular expression.
    Class(String),
    /// An operator, a bracket, or a repetition as it stands.
    Mark(String),
}

/// True if the text defines rules with `::=`.
pub(crate) fn is_gbnf(text: &str) -> bool {
    let before = |line: &str, sign: &str| line.split(sign).next().unwrap_or_default().trim().to_owned();
    text.lines().any(|line| {
        let name = before(line, "::=");
        line.contains("::=") && !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || c == '-' || c == '_')
    })
}

/// The same grammar in Lark's notation.
pub(crate) fn to_lark(text: &str) -> Result<String, String> {
    let tokens = tokens(text)?;
    let defines = |at: usize| matches!(&tokens[at..], [Token::Name(_), Token::Defines, ..]);
    let mut names = Names::default();
    let mut out = String::new();
    for (at, token) in tokens.iter().enumerate() {
        match token {
            Token::Name(name) if defines(at) => {
                let line = if at == 0 { "" } else { "\n" };
                out.push_str(&format!("{line}{}", names.of(name)));
            }
            Token::Name(name) => {
                out.push_str(&format!(" {}", names.of(name)));
            }
            Token::Defines if at > 0 && defines(at - 1) => out.push(':'),
            Token::Defines => return Err("`::=` without a name before it".to_owned()),
            // An empty string is nothing to Lark; an empty group is written as an optional nothing.
            Token::Literal(text) if text.is_empty() => out.push_str(" \"\""),
            Token::Literal(text) => {
                out.push_str(&format!(" {}", serde_json::Value::from(text.as_str())));
            }
            Token::Class(class) => {
                out.push_str(&format!(" /{class}/"));
            }
            Token::Mark(mark) if matches!(mark.as_str(), "|" | "(" | ")") => {
                out.push_str(&format!(" {mark}"));
            }
            Token::Mark(mark) => out.push_str(mark),
        }
    }
    if !matches!(tokens.first(), Some(Token::Name(_))) || !names.0.contains_key("root") {
        return Err("a GBNF grammar must have a rule called root, and begin with a rule".to_owned());
    }
    out.push('\n');
    Ok(out)
}

/// Lark's names of rules.
#[derive(Default)]
struct Names(HashMap<String, String>);

impl Names {
    fn of(&mut self, name: &str) -> String {
        let next = self.0.len();
        let fresh = || {
            if name == "root" {
                "start".to_owned()
            } else {
                format!("rule_{next}")
            }
        };
        self.0.entry(name.to_owned()).or_insert_with(fresh).clone()
    }
}

fn tokens(text: &str) -> Result<Vec<Token>, String> {
    let mut chars = text.chars().peekable();
    let mut tokens = Vec::new();
    while let Some(&c) = chars.peek() {
        match c {
            _ if c.is_whitespace() => {
                chars.next();
            }
            '#' => while chars.next_if(|&c| c != '\n').is_some() {},
            '"' => tokens.push(Token::Literal(literal(&mut chars)?)),
            '[' => tokens.push(Token::Class(class(&mut chars)?)),
            '{' => {
                let mut mark = String::new();
                while let Some(c) = chars.next_if(|&c| c != '}') {
                    mark.push(c);
                }
                mark.push(chars.next().ok_or("a repetition without its end")?);
                tokens.push(Token::Mark(mark));
            }
            '.' => {
                chars.next();
                tokens.push(Token::Class(r"[\s\S]".to_owned()));
            }
            '|' | '(' | ')' | '*' | '+' | '?' => {
                chars.next();
                tokens.push(Token::Mark(c.to_string()));
            }
            ':' => {
                let sign: String = chars.by_ref().take(3).collect();
                if sign != "::=" {
                    return Err(format!("{sign:?} is not known in GBNF"));
                }
                tokens.push(Token::Defines);
            }
            _ if is_name(c) => {
                let mut name = String::new();
                while let Some(c) = chars.next_if(|&c| is_name(c)) {
                    name.push(c);
                }
                tokens.push(Token::Name(name));
            }
            _ => return Err(format!("{c:?} is not known in GBNF")),
        }
    }
    Ok(tokens)
}

fn is_name(c: char) -> bool {
    c.is_alphanumeric() || c == '-' || c == '_'
}

fn literal(chars: &mut Peekable<Chars<'_>>) -> Result<String, String> {
    chars.next();
    let mut text = String::new();
    loop {
        match chars.next() {
            Some('"') => return Ok(text),
            Some('\\') => text.push(escape(chars)?),
            Some(c) => text.push(c),
            None => return Err("a string without its end".to_owned()),
        }
    }
}

/// A character class, every character of it by its number.
fn class(chars: &mut Peekable<Chars<'_>>) -> Result<String, String> {
    chars.next();
    let mut out = "[".to_owned();
    if chars.next_if_eq(&'^').is_some() {
        out.push('^');
    }
    let mut last = None;
    loop {
        let c = match chars.next() {
            Some(']') => break,
            Some('-') if last.is_some() && chars.peek().is_some_and(|&c| c != ']') => {
                out.push('-');
                last = None;
                continue;
            }
            Some('\\') => escape(chars)?,
            Some(c) => c,
            None => return Err("a character class without its end".to_owned()),
        };
        out.push_str(&format!("\\x{{{:x}}}", u32::from(c)));
        last = Some(c);
    }
    out.push(']');
    Ok(out)
}

fn escape(chars: &mut Peekable<Chars<'_>>) -> Result<char, String> {
    let c = chars.next().ok_or("an escape without its end")?;
    let digits = match c {
        'n' => return Ok('\n'),
        'r' => return Ok('\r'),
        't' => return Ok('\t'),
        'x' => 2,
        'u' => 4,
        'U' => 8,
        _ => return Ok(c),
    };
    let number: String = chars.by_ref().take(digits).collect();
    u32::from_str_radix(&number, 16)
        .ok()
        .and_then(char::from_u32)
        .ok_or_else(|| format!("\\{c}{number} is no character"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_classes_and_repetitions_are_carried_over() {
        let gbnf = "# a list\nroot ::= Item-1 (\",\" ws Item-1){1,3}\nItem-1 ::= [a-f\\x30-9\\]-]+ |\n  \"x\\n\\\"\" | .?\nws ::= \" \"*";
        assert!(is_gbnf(gbnf));
        assert_eq!(
            to_lark(gbnf),
            Ok("start: rule_1 ( \",\" rule_2 rule_1 ){1,3}\n\
                rule_1: /[\\x{61}-\\x{66}\\x{30}-\\x{39}\\x{5d}\\x{2d}]/+ | \"x\\n\\\"\" | /[\\s\\S]/?\n\
                rule_2: \" \"*\n"
                .to_owned())
        );
    }

    #[test]
    fn larks_grammars_are_left_alone_and_broken_ones_refused() {
        assert!(!is_gbnf("start: \"a ::= b\" | other\nother: /x/"));
        for wrong in [
            "root ::= \"a",
            "root ::= [a",
            "a ::= \"b\"",
            "::= x",
            "root ::= \\",
            "root := x",
            "root ::= \"\\xzz\"",
        ] {
            assert!(to_lark(wrong).is_err(), "{wrong}");
        }
    }
}
