-- The roles of the programs, beside the owner of the schema. They may log in, and `saf grant` in
-- compose.yaml gives them what their work needs in schema saf. PostgreSQL's image runs this file once,
-- when it creates the database.
\getenv forwarder_password FORWARDER_PASSWORD
CREATE ROLE saf_forwarder LOGIN PASSWORD :'forwarder_password';

-- the application, where there is one: it creates its own tables
\getenv flights_password FLIGHTS_PASSWORD
\if :{?flights_password}
CREATE ROLE flights LOGIN PASSWORD :'flights_password';
GRANT CREATE ON SCHEMA public TO flights;
\endif
