//! `GET /dashboard` on the clients' port: where the dashboard is, or how to have one. It shows figures and records of all
//! clients' requests, so it is on the operators' listener, behind their token, and nothing of it is told here.

use std::net::{IpAddr, SocketAddr};

use actix_web::web::Data;
use actix_web::{HttpRequest, HttpResponse};

use super::state::HttpState;
use crate::admin::dashboard::guarded;

/// No script at all, and no style but the page's own attributes, of which it has none.
const POLICY: &str = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; img-src data:";

/// `GET /dashboard`.
pub async fn page(request: HttpRequest, state: Data<HttpState>) -> HttpResponse {
    let text = match state.admin.get() {
        None => OFF.to_owned(),
        Some(address) => {
            let local = request.peer_addr().is_some_and(|peer| peer.ip().is_loopback());
            on(*address, request.connection_info().host(), local)
        }
    };
    let html = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"UTF-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<title>Baton</title>\n<link rel=\"icon\" href=\"data:,\">\n\
         </head>\n<body>\n<h1>Baton</h1>\n{text}\n</body>\n</html>\n"
    );
    guarded(POLICY).content_type("text/html; charset=utf-8").body(html)
}

const OFF: &str = "<p>The dashboard is part of the admin plane, which is off. It shows every client's requests, so it has an \
    address and a token of its own. To turn it on, add this to the coordinator's configuration, with a long random token, \
    and start it again:</p>\n\
    <pre>[admin]\nlisten = \"127.0.0.1:7700\"\ntokens = [\"...\"]</pre>\n\
    <p><code>openssl rand -hex 24</code> makes a token. The dashboard is then at \
    <code>http://127.0.0.1:7700/dashboard</code>.</p>";

/// Where the dashboard is. `host`: what the client calls this server, used where the admin plane listens on every address.
fn on(address: SocketAddr, host: &str, local: bool) -> String {
    let ip = match address.ip() {
        IpAddr::V4(ip) => ip.to_string(),
        IpAddr::V6(ip) => format!("[{ip}]"),
    };
    let name = if address.ip().is_unspecified() {
        plain_host(host).unwrap_or("HOST")
    } else {
        &ip
    };
    let url = format!("http://{name}:{}/dashboard", address.port());
    let reach = if address.ip().is_loopback() && !local {
        format!(
            "<p>The admin plane listens on the coordinator's own machine only. From another one, \
             <code>ssh -L {port}:{ip}:{port} HOST</code> makes a way to it.</p>",
            port = address.port()
        )
    } else {
        String::new()
    };
    format!(
        "<p>The dashboard is on the admin plane, at <a href=\"{url}\">{url}</a>. It asks for a token of \
         <code>admin.tokens</code>.</p>{reach}"
    )
}

/// The host of a `Host` header without its port, if it has no other characters than those of names and addresses.
fn plain_host(host: &str) -> Option<&str> {
    let end = match host.strip_prefix('[') {
        Some(rest) => rest.find(']')? + 2,
        None => host.find(':').unwrap_or(host.len()),
    };
    let name = host.get(..end)?;
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b".-[]:".contains(&byte);
    (!name.is_empty() && name.len() <= 253 && name.bytes().all(plain)).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn the_link_leads_to_where_the_admin_plane_listens() {
        let here = on(address("127.0.0.1:7700"), "example.com:8080", true);
        assert!(here.contains("href=\"http://127.0.0.1:7700/dashboard\"") && !here.contains("ssh"));
        assert!(on(address("127.0.0.1:7700"), "example.com", false).contains("ssh -L 7700:127.0.0.1:7700"));
        let every = on(address("0.0.0.0:7700"), "example.com:8080", false);
        assert!(
            every.contains("\"http://example.com:7700/dashboard\"") && !every.contains("ssh"),
            "{every}"
        );
        assert!(on(address("[::]:7700"), "[::1]:8080", true).contains("\"http://[::1]:7700/dashboard\""));
    }

    #[test]
    fn what_a_client_calls_the_server_is_no_markup() {
        for hostile in ["\"><script>alert(1)</script>", "a b", "", "[::1", "a\"onclick=x:80"] {
            let page = on(address("0.0.0.0:7700"), hostile, false);
            assert!(page.contains("\"http://HOST:7700/dashboard\""), "{hostile}: {page}");
        }
    }
}
