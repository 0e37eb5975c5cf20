//! What may be fetched or opened, judged by its text.

use std::net::IpAddr;
use std::path::PathBuf;

use config::MediaConfig;
use thiserror::Error;

use super::address::{ends_in_a_number, is_public, literal};
use super::url;
pub use super::url::Remote;

/// Longest URL, in characters.
const MAX_URL: usize = 4_096;
/// Names under which anybody can have any address, and names that mean this machine or this network.
const DECEIVING: [&str; 12] = [
    "nip.io",
    "sslip.io",
    "xip.io",
    "localtest.me",
    "lvh.me",
    "lacolhost.com",
    "vcap.me",
    "traefik.me",
    "localhost",
    "local",
    "internal",
    "localdomain",
];

/// What a prompt can name beside text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MediaKind {
    /// JPEG or PNG.
    Image,
    /// MP4, AVI or WMV.
    Video,
    /// MP3, WAV or FLAC.
    Audio,
}

impl MediaKind {
    /// The kind that an item of this type names: `image_url`, `video_url`, `audio_url`.
    pub fn of_item(kind: &str) -> Option<Self> {
        match kind {
            "image_url" => Some(Self::Image),
            "video_url" => Some(Self::Video),
            "audio_url" => Some(Self::Audio),
            _ => None,
        }
    }

    /// Extensions of its files.
    pub fn extensions(self) -> &'static [&'static str] {
        match self {
            Self::Image => &["jpg", "jpeg", "png"],
            Self::Video => &["mp4", "avi", "wmv"],
            Self::Audio => &["mp3", "wav", "flac"],
        }
    }

    /// True if a `data:` URL of this type is one of its kind.
    fn is_called(self, media_type: &str) -> bool {
        let (class, format) = media_type.split_once('/').unwrap_or_default();
        let format = format.trim_start_matches("x-");
        match self {
            Self::Image => class == "image" && self.extensions().contains(&format),
            Self::Video => {
                class == "video" && (self.extensions().contains(&format) || matches!(format, "msvideo" | "ms-wmv"))
            }
            Self::Audio => class == "audio" && (self.extensions().contains(&format) || format == "mpeg"),
        }
    }
}

/// Where a medium lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// On another host. Its name is allowed; its address is judged when it is known.
    Remote(Remote),
    /// In a file. Whether it lies below the folder is judged when it is opened.
    Local(PathBuf),
    /// In the reference itself, in base64.
    Inline(String),
}

/// Why a medium is refused. Says nothing that the client did not send.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Refusal {
    /// Too long for a URL.
    #[error("the URL is longer than {MAX_URL} characters")]
    TooLong,
    /// Neither `http`, `https`, `file`, `data`, a path nor base64.
    #[error("only http, https, file and data URLs, paths and base64 are read")]
    Scheme,
    /// Not a URL, or one that can be read in several ways.
    #[error("the URL is not well-formed")]
    Malformed,
    /// The host is on no list.
    #[error("the host is not one of media.allowed_domains")]
    NotAllowed,
    /// The name can have any address, or means this machine or network.
    #[error("the host name can stand for any address, or for an internal one")]
    Deceiving,
    /// The address is not one of the public internet.
    #[error("the address {0} is not public")]
    NotPublic(IpAddr),
    /// Not a file of this kind.
    #[error("the file must be one of: {}", .0.join(", "))]
    Format(&'static [&'static str]),
    /// Outside of the folder, or not there.
    #[error("the file is not below media.local_root")]
    Outside,
    /// No plain file.
    #[error("it is not a plain file")]
    NoFile,
    /// Too many bytes.
    #[error("it has more than {0} bytes")]
    TooLarge(u64),
    /// Too many media in one request.
    #[error("there are more than {0} media in the request")]
    TooMany(usize),
    /// Too many bytes of all media of one request.
    #[error("the media of the request have more than {0} bytes together")]
    TogetherTooLarge(u64),
}

/// The rules of one server.
#[derive(Clone, Debug)]
pub struct Policy {
    allowed: Vec<String>,
    /// Folder below which local files must lie.
    pub root: PathBuf,
    limits: [u64; 3],
}

impl Policy {
    /// The rules that `config` sets.
    pub fn new(config: &MediaConfig) -> Self {
        let host = |host: &String| {
            let host = host.trim().to_ascii_lowercase();
            let plain = host
                .strip_prefix('[')
                .and_then(|host| host.strip_suffix(']'))
                .unwrap_or(&host);
            plain.strip_suffix('.').unwrap_or(plain).to_owned()
        };
        Self {
            allowed: config
                .allowed_domains
                .iter()
                .map(host)
                .filter(|host| !host.is_empty())
                .collect(),
            root: PathBuf::from(&config.local_root),
            limits: [config.max_image_bytes, config.max_video_bytes, config.max_audio_bytes],
        }
    }

    /// Most bytes of a medium.
    pub fn max_bytes(&self, kind: MediaKind) -> u64 {
        self.limits[match kind {
            MediaKind::Image => 0,
            MediaKind::Video => 1,
            MediaKind::Audio => 2,
        }]
    }

    /// Judges a reference. Nothing is resolved, opened or connected to.
    ///
    /// # Errors
    /// Why it is refused.
    pub fn check(&self, kind: MediaKind, reference: &str) -> Result<Source, Refusal> {
        let scheme = reference.split_once(':').map(|(scheme, _)| scheme.to_ascii_lowercase());
        let after = |prefix: usize| reference.get(prefix..).unwrap_or_default();
        match scheme.as_deref() {
            Some("data") => self.inline(kind, after(5)),
            Some("http" | "https" | "file") if reference.chars().count() > MAX_URL => Err(Refusal::TooLong),
            Some(scheme @ ("http" | "https")) => {
                let rest = after(scheme.len() + 1).strip_prefix("//").ok_or(Refusal::Malformed)?;
                let remote = url::remote(scheme == "https", rest).ok_or(Refusal::Malformed)?;
                self.host(&remote.host)?;
                Ok(Source::Remote(remote))
            }
            Some("file") => self.local(kind, after(5).strip_prefix("//").ok_or(Refusal::Malformed)?),
            _ if reference.starts_with('/') => self.local(kind, reference),
            // Bare base64 is a JPEG; of other kinds nobody could tell the format.
            None if kind == MediaKind::Image => self.base64(kind, reference),
            None | Some(_) => Err(Refusal::Scheme),
        }
    }

    /// Judges a host by its name, and by its address if it is one.
    fn host(&self, host: &str) -> Result<(), Refusal> {
        let deceives = |name: &&str| host == *name || host.strip_suffix(*name).is_some_and(|rest| rest.ends_with('.'));
        if DECEIVING.iter().any(deceives) {
            return Err(Refusal::Deceiving);
        }
        if let Some(address) = literal(host) {
            self.address(address)?;
        } else if ends_in_a_number(host) || host.contains(':') {
            return Err(Refusal::Malformed);
        }
        if self.allowed.iter().any(|allowed| allowed == host) {
            Ok(())
        } else {
            Err(Refusal::NotAllowed)
        }
    }

    /// Judges an address that a name has been resolved to.
    ///
    /// # Errors
    /// It is not public.
    pub fn address(&self, address: IpAddr) -> Result<(), Refusal> {
        if is_public(address) {
            Ok(())
        } else {
            Err(Refusal::NotPublic(address))
        }
    }

    fn local(&self, kind: MediaKind, path: &str) -> Result<Source, Refusal> {
        let path = PathBuf::from(path);
        if !path.is_absolute() || path.as_os_str().as_encoded_bytes().contains(&0) {
            return Err(Refusal::Malformed);
        }
        let climbs = path.components().any(|part| part == std::path::Component::ParentDir);
        if climbs || !path.starts_with(&self.root) {
            return Err(Refusal::Outside);
        }
        Self::extension(kind, &path)?;
        Ok(Source::Local(path))
    }

    /// Judges the extension of a file.
    ///
    /// # Errors
    /// It is none of the kind's.
    pub fn extension(kind: MediaKind, path: &std::path::Path) -> Result<(), Refusal> {
        let extension = path.extension().and_then(|extension| extension.to_str());
        let extension = extension.map(str::to_ascii_lowercase).unwrap_or_default();
        if kind.extensions().contains(&extension.as_str()) {
            Ok(())
        } else {
            Err(Refusal::Format(kind.extensions()))
        }
    }

    /// What follows `data:`.
    fn inline(&self, kind: MediaKind, rest: &str) -> Result<Source, Refusal> {
        let (head, data) = rest.split_once(',').ok_or(Refusal::Malformed)?;
        let media_type = head.to_ascii_lowercase();
        let media_type = media_type.strip_suffix(";base64").ok_or(Refusal::Malformed)?;
        if !kind.is_called(media_type) {
            return Err(Refusal::Format(kind.extensions()));
        }
        self.base64(kind, data)
    }

    fn base64(&self, kind: MediaKind, data: &str) -> Result<Source, Refusal> {
        let digits = data.trim_end_matches('=');
        let legal = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/');
        if digits.is_empty() || data.len() - digits.len() > 2 || !digits.bytes().all(legal) {
            return Err(Refusal::Scheme);
        }
        let most = self.max_bytes(kind);
        if digits.len() as u64 / 4 * 3 > most {
            return Err(Refusal::TooLarge(most));
        }
        Ok(Source::Inline(data.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy() -> Policy {
        Policy::new(&MediaConfig {
            allowed_domains: vec![
                " Upload.Example.org ".to_owned(),
                "9.9.9.9".to_owned(),
                "127.0.0.1".to_owned(),
                "a.nip.io".to_owned(),
            ],
            max_image_bytes: 6,
            ..MediaConfig::default()
        })
    }

    fn check(reference: &str) -> Result<Source, Refusal> {
        policy().check(MediaKind::Image, reference)
    }

    #[test]
    fn hosts_must_be_on_the_list() {
        for (url, host, port, target) in [
            (
                "http://upload.example.org/a.png?x=1#f",
                "upload.example.org",
                80,
                "/a.png?x=1",
            ),
            ("HTTPS://UPLOAD.EXAMPLE.ORG./a", "upload.example.org", 443, "/a"),
            ("http://upload.example.org:8080", "upload.example.org", 8080, "/"),
            ("http://9.9.9.9/", "9.9.9.9", 80, "/"),
        ] {
            let Ok(Source::Remote(remote)) = check(url) else {
                panic!("{url}: {:?}", check(url))
            };
            assert_eq!(
                (remote.host.as_str(), remote.port, remote.target.as_str()),
                (host, port, target),
                "{url}"
            );
            assert_eq!(remote.tls, url.starts_with("HTTPS"));
        }
        for url in [
            "http://example.org/",
            "http://evil-upload.example.org/",
            "http://upload.example.org.evil.net/",
            "http://8.8.8.8/",
        ] {
            assert_eq!(check(url), Err(Refusal::NotAllowed), "{url}");
        }
        let nothing = Policy::new(&MediaConfig::default());
        assert_eq!(
            nothing.check(MediaKind::Image, "http://upload.example.org/"),
            Err(Refusal::NotAllowed),
            "no list: nothing"
        );
    }

    #[test]
    fn internal_addresses_are_refused_also_where_the_list_has_them() {
        for url in [
            "http://127.0.0.1/",
            "http://2130706433/",
            "http://0x7f.1/",
            "http://0177.0.0.1/",
            "http://[::1]/",
            "http://[::ffff:127.0.0.1]/",
            "http://169.254.169.254/latest",
            "http://10.0.0.1:80/",
            "http://0/",
            "http://[fe80::1]/",
        ] {
            assert!(
                matches!(check(url), Err(Refusal::NotPublic(_))),
                "{url}: {:?}",
                check(url)
            );
        }
        for url in [
            "http://localhost/",
            "http://a.localhost/",
            "http://127.0.0.1.nip.io/",
            "http://a.nip.io/",
            "http://x.sslip.io:80/",
        ] {
            assert_eq!(check(url), Err(Refusal::Deceiving), "{url}");
        }
    }

    #[test]
    fn what_can_be_read_in_two_ways_is_refused() {
        for url in [
            "http:upload.example.org/",
            "http:///a",
            "http://",
            "http://upload.example.org@127.0.0.1/",
            "http://a b/",
            "http://upload.example.org\\@127.0.0.1/",
            "http://upload.example.org:0/",
            "http://upload.example.org:x/",
            "http://upload.example.org:99999/",
            "http://a..b/",
            "http://%31/",
            "http://\u{ff11}27.0.0.1/",
            "http://1.2.3.256/",
            "http://[::1",
            "http://[::1]x/",
            "http://upload.example.org:/",
            "http://[a]/",
        ] {
            assert_eq!(check(url), Err(Refusal::Malformed), "{url}");
        }
        for scheme in [
            "ftp://upload.example.org/",
            "gopher://x/",
            "javascript:alert(1)",
            "unix:/a",
            "",
        ] {
            assert_eq!(check(scheme), Err(Refusal::Scheme), "{scheme}");
        }
        let long = format!("http://upload.example.org/{}", "a".repeat(4_096));
        assert_eq!(check(&long), Err(Refusal::TooLong));
    }

    #[test]
    fn files_lie_below_the_folder_and_have_the_right_kind() {
        for path in [
            "/data/multimodal_inputs/a.PNG",
            "file:///data/multimodal_inputs/b/c.jpeg",
        ] {
            assert!(matches!(check(path), Ok(Source::Local(_))), "{path}");
        }
        for path in [
            "/etc/passwd.png",
            "/data/multimodal_inputs/../a.png",
            "file:///data/multimodal_inputs2/a.png",
            "/data/a.png",
        ] {
            assert_eq!(check(path), Err(Refusal::Outside), "{path}");
        }
        for path in [
            "/data/multimodal_inputs/a.mp4",
            "/data/multimodal_inputs/a",
            "/data/multimodal_inputs/png",
        ] {
            assert!(matches!(check(path), Err(Refusal::Format(_))), "{path}");
        }
        assert_eq!(check("file://host/a.png"), Err(Refusal::Malformed));
    }

    #[test]
    fn inline_media_have_the_right_kind_and_size() {
        assert_eq!(check("AAAA"), Ok(Source::Inline("AAAA".to_owned())));
        assert_eq!(
            check("data:image/png;base64,AAAAAAA="),
            Ok(Source::Inline("AAAAAAA=".to_owned()))
        );
        assert_eq!(check("data:image/png;base64,AAAAAAAAAAAA"), Err(Refusal::TooLarge(6)));
        assert_eq!(policy().check(MediaKind::Video, "AAAA"), Err(Refusal::Scheme));
        assert!(matches!(check("data:video/mp4;base64,AAAA"), Err(Refusal::Format(_))));
        assert!(matches!(check("data:text/html;base64,AAAA"), Err(Refusal::Format(_))));
        assert_eq!(check("data:image/png,AAAA"), Err(Refusal::Malformed));
        assert_eq!(check("data:image/png;base64,A A"), Err(Refusal::Scheme));
        assert!(policy().check(MediaKind::Audio, "data:audio/mpeg;base64,AAAA").is_ok());
        assert!(
            policy()
                .check(MediaKind::Video, "data:video/x-ms-wmv;base64,AAAA")
                .is_ok()
        );
    }
}
