//! Which addresses belong to the public internet.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// True for addresses that anybody may be led to. Not: loopback, private, link-local, shared (CGNAT), multicast,
/// unspecified, reserved, documentation and benchmarking ranges; and no IPv6 form of such an IPv4 address.
pub fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => v4_is_public(address),
        IpAddr::V6(address) => v6_is_public(address),
    }
}

fn v4_is_public(address: Ipv4Addr) -> bool {
    let [a, b, c, _] = address.octets();
    let special = matches!(
        (a, b, c),
        (0 | 10 | 127, ..)
            | (100, 64..=127, _)
            | (169, 254, _)
            | (172, 16..=31, _)
            | (192, 0, 0 | 2)
            | (192, 88, 99)
            | (192, 168, _)
            | (198, 18 | 19, _)
            | (198, 51, 100)
            | (203, 0, 113)
            | (224..=255, ..)
    );
    !special
}

fn v6_is_public(address: Ipv6Addr) -> bool {
    let s = address.segments();
    let v4 = |high: u16, low: u16| {
        let [a, b] = high.to_be_bytes();
        let [c, d] = low.to_be_bytes();
        v4_is_public(Ipv4Addr::new(a, b, c, d))
    };
    match s {
        // IPv4 in disguise: mapped, translated by NAT64, 6to4.
        [0, 0, 0, 0, 0, 0xffff, high, low] | [0x64, 0xff9b, 0, 0, 0, 0, high, low] | [0x2002, high, low, ..] => {
            v4(high, low)
        }
        // Teredo and other protocol assignments, documentation.
        [0x2001, 0..=0x1ff, ..] | [0x2001, 0xdb8, ..] | [0x3fff, 0..=0xfff, ..] => false,
        // Everything else that is routed begins with 001.
        [first, ..] => first & 0xe000 == 0x2000,
    }
}

/// The address that a host name is, if it is one: dotted, or as one to four numbers in decimal, octal or hexadecimal, as
/// the C library reads them; or IPv6, without brackets.
pub fn literal(host: &str) -> Option<IpAddr> {
    if let Ok(address) = host.parse::<Ipv6Addr>() {
        return Some(IpAddr::V6(address));
    }
    let parts: Vec<u64> = host.split('.').map(number).collect::<Option<_>>()?;
    let (last, before) = parts.split_last()?;
    if before.len() > 3 || before.iter().any(|part| *part > 255) {
        return None;
    }
    let rest = 4 - before.len() as u32;
    if *last >= 1_u64 << (8 * rest) {
        return None;
    }
    let high = before.iter().fold(0_u64, |address, part| (address << 8) | part);
    let address = (high << (8 * rest)) | last;
    u32::try_from(address)
        .ok()
        .map(|address| IpAddr::V4(Ipv4Addr::from(address)))
}

/// True if the last label of a host name is a number: such a name can only be an address.
pub fn ends_in_a_number(host: &str) -> bool {
    let last = host.rsplit('.').next().unwrap_or_default();
    number(last).is_some() || (!last.is_empty() && last.bytes().all(|byte| byte.is_ascii_digit()))
}

/// A number in decimal, octal (`0...`) or hexadecimal (`0x...`).
fn number(text: &str) -> Option<u64> {
    let (digits, radix) = match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some("") => return Some(0),
        Some(digits) => (digits, 16),
        None if text.len() > 1 && text.starts_with('0') => (&text[1..], 8),
        None => (text, 10),
    };
    if digits.is_empty() || digits.starts_with('+') {
        return None;
    }
    u64::from_str_radix(digits, radix).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_public_is_told_in_every_form() {
        for private in [
            "127.0.0.1",
            "127.255.0.9",
            "10.1.2.3",
            "172.16.0.1",
            "172.31.255.255",
            "192.168.0.1",
            "169.254.169.254",
            "100.64.0.1",
            "100.127.0.1",
            "0.0.0.0",
            "0.1.2.3",
            "224.0.0.1",
            "255.255.255.255",
            "240.0.0.1",
            "192.0.2.1",
            "198.18.0.1",
            "198.51.100.7",
            "203.0.113.1",
            "::",
            "::1",
            "::ffff:127.0.0.1",
            "::ffff:10.0.0.1",
            "::127.0.0.1",
            "64:ff9b::7f00:1",
            "2002:7f00:1::",
            "2002:a00:1::1",
            "fe80::1",
            "fec0::1",
            "fc00::1",
            "fd12::1",
            "ff02::1",
            "2001:db8::1",
            "2001::1",
        ] {
            let address: IpAddr = private.parse().expect(private);
            assert!(!is_public(address), "{private}");
        }
        for public in [
            "8.8.8.8",
            "1.1.1.1",
            "100.63.0.1",
            "100.128.0.1",
            "172.15.0.1",
            "172.32.0.1",
            "192.0.1.1",
            "223.255.255.255",
            "2606:4700:4700::1111",
            "::ffff:8.8.8.8",
            "64:ff9b::808:808",
            "2002:808:808::1",
        ] {
            let address: IpAddr = public.parse().expect(public);
            assert!(is_public(address), "{public}");
        }
    }

    #[test]
    fn numbers_are_addresses() {
        let loopback = Some(IpAddr::V4(Ipv4Addr::LOCALHOST));
        for form in [
            "127.0.0.1",
            "2130706433",
            "0x7f000001",
            "0X7F.1",
            "017700000001",
            "0177.0.0.01",
            "127.1",
            "127.0.1",
            "0x7f.0x0.0x0.0x1",
        ] {
            assert_eq!(literal(form), loopback, "{form}");
            assert!(ends_in_a_number(form), "{form}");
        }
        assert_eq!(literal("::1"), Some(IpAddr::V6(Ipv6Addr::LOCALHOST)));
        for name in [
            "example.com",
            "a.1b",
            "256.0.0.1",
            "1.2.3.4.5",
            "4294967296",
            "1.2.3.256",
            "",
            ".",
            "1..2",
            "0x",
            "08",
        ] {
            if name != "0x" {
                assert_eq!(literal(name), None, "{name}");
            }
        }
        for number in ["1.2.3.256", "4294967296", "a.5", "a.08", "99999999999999999999999"] {
            assert!(ends_in_a_number(number), "{number}");
        }
        assert!(!ends_in_a_number("example.com") && !ends_in_a_number("a.1b"));
    }
}
