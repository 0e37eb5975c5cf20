//! `GET /dashboard`: the page of operators, from `coordinator/assets/dashboard`, with its charts by uPlot, from
//! `coordinator/assets/uplot`. Nothing of it is fetched from elsewhere, and nothing of it is secret: it shows only what its
//! reader's token opens.

use actix_web::http::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS};
use actix_web::web::Path;
use actix_web::{HttpRequest, HttpResponse, HttpResponseBuilder};

use super::answers::Problem;

/// Scripts, styles and figures from here alone, no other page around it, and no text that is taken for markup or for a script,
/// wherever it came from.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; \
    base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'";

const HTML: &str = "text/html; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";

const PAGE: &str = include_str!("../../assets/dashboard/index.html");
/// Name, kind, text.
const FILES: [(&str, &str, &str); 11] = [
    (
        "dashboard.css",
        STYLE,
        include_str!("../../assets/dashboard/dashboard.css"),
    ),
    ("main.js", SCRIPT, include_str!("../../assets/dashboard/main.js")),
    ("server.js", SCRIPT, include_str!("../../assets/dashboard/server.js")),
    ("dom.js", SCRIPT, include_str!("../../assets/dashboard/dom.js")),
    ("charts.js", SCRIPT, include_str!("../../assets/dashboard/charts.js")),
    ("nodes.js", SCRIPT, include_str!("../../assets/dashboard/nodes.js")),
    (
        "requests.js",
        SCRIPT,
        include_str!("../../assets/dashboard/requests.js"),
    ),
    ("record.js", SCRIPT, include_str!("../../assets/dashboard/record.js")),
    (
        "icon.svg",
        "image/svg+xml",
        include_str!("../../assets/dashboard/icon.svg"),
    ),
    (
        "uPlot.iife.min.js",
        SCRIPT,
        include_str!("../../assets/uplot/uPlot.iife.min.js"),
    ),
    ("uPlot.min.css", STYLE, include_str!("../../assets/uplot/uPlot.min.css")),
];

/// `GET /dashboard`.
///
/// # Errors
/// There is a query: what is not understood is not ignored.
pub async fn page(request: HttpRequest) -> Result<HttpResponse, Problem> {
    if !request.query_string().is_empty() {
        return Err(Problem::Invalid("/dashboard takes no query".to_owned()));
    }
    Ok(guarded(POLICY).content_type(HTML).body(PAGE))
}

/// `GET /dashboard/{file}`: what the page loads.
///
/// # Errors
/// There is no such file.
pub async fn file(name: Path<String>) -> Result<HttpResponse, Problem> {
    let found = FILES.iter().find(|(file, ..)| *file == name.as_str());
    let (_, kind, text) = found.ok_or_else(|| Problem::NotFound("the dashboard has no such file".to_owned()))?;
    Ok(guarded(POLICY).content_type(*kind).body(*text))
}

/// An answer that a browser handles with care. It asks for the page anew each time: after an update the files fit together.
pub(crate) fn guarded(policy: &'static str) -> HttpResponseBuilder {
    let mut answer = HttpResponse::Ok();
    answer
        .insert_header((CONTENT_SECURITY_POLICY, policy))
        .insert_header((X_CONTENT_TYPE_OPTIONS, "nosniff"))
        .insert_header((REFERRER_POLICY, "no-referrer"))
        .insert_header((CACHE_CONTROL, "no-cache"));
    answer
}
