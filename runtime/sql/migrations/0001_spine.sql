-- The run record: runs, their append-only events, their token-exact model calls.
-- Every key starts with the tenant. The row is the job: a run is claimed, leased and fenced here.

CREATE SCHEMA IF NOT EXISTS flywheel;

CREATE TABLE runtime.tenants (
    tenant_id  text PRIMARY KEY CHECK (tenant_id ~ '^[a-z0-9_-]{1,64}$'),
    name       text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now()
);
INSERT INTO runtime.tenants (tenant_id, name) VALUES ('default', 'Default');

CREATE TABLE runtime.api_keys (
    tenant_id    text NOT NULL REFERENCES runtime.tenants,
    id           text NOT NULL,
    name         text NOT NULL,
    secret_hash  bytea NOT NULL,
    scopes       text[] NOT NULL,
    created_at   timestamptz NOT NULL DEFAULT now(),
    expires_at   timestamptz,
    revoked_at   timestamptz,
    last_used_at timestamptz,
    PRIMARY KEY (tenant_id, id)
);
CREATE UNIQUE INDEX api_keys_by_id ON runtime.api_keys (id);

CREATE TABLE runtime.aliases (
    tenant_id  text NOT NULL REFERENCES runtime.tenants,
    domain     text NOT NULL,
    alias      text NOT NULL,
    policy     jsonb NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant_id, domain, alias)
);

CREATE TABLE runtime.runs (
    tenant_id        text NOT NULL REFERENCES runtime.tenants,
    id               text NOT NULL,
    kind             text NOT NULL,
    domain           text NOT NULL,
    domain_digest    text NOT NULL,
    task             jsonb NOT NULL,
    policy           jsonb NOT NULL,
    sampling         jsonb NOT NULL,
    priority         integer NOT NULL,
    state            text NOT NULL DEFAULT 'queued',
    reason           text,
    answer           jsonb,
    verdict          jsonb,
    failure          jsonb,
    usage            jsonb NOT NULL DEFAULT '{}',
    initial_snapshot text,
    attempts         integer NOT NULL DEFAULT 0,
    cancel_requested boolean NOT NULL DEFAULT false,
    created_at       timestamptz NOT NULL DEFAULT now(),
    started_at       timestamptz,
    finished_at      timestamptz,
    idempotency_key  text,
    request_hash     text,
    last_seq         integer NOT NULL DEFAULT 0,
    lease_owner      text,
    lease_until      timestamptz,
    fence            bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (tenant_id, id)
);
CREATE UNIQUE INDEX runs_by_idempotency_key
    ON runtime.runs (tenant_id, idempotency_key) WHERE idempotency_key IS NOT NULL;
CREATE INDEX runs_to_claim ON runtime.runs (priority, created_at, id) WHERE state = 'queued';
CREATE INDEX runs_leased ON runtime.runs (lease_until) WHERE state = 'running';
CREATE INDEX runs_newest ON runtime.runs (tenant_id, created_at DESC, id DESC);

-- What the agent must never see is kept out of the row that everything reads.
CREATE TABLE runtime.run_private (
    tenant_id   text NOT NULL,
    run_id      text NOT NULL,
    expectation jsonb,
    PRIMARY KEY (tenant_id, run_id),
    FOREIGN KEY (tenant_id, run_id) REFERENCES runtime.runs ON DELETE CASCADE
);

CREATE TABLE runtime.run_files (
    tenant_id text NOT NULL,
    run_id    text NOT NULL,
    path      text NOT NULL,
    content   bytea NOT NULL,
    PRIMARY KEY (tenant_id, run_id, path),
    FOREIGN KEY (tenant_id, run_id) REFERENCES runtime.runs ON DELETE CASCADE
);

CREATE TABLE runtime.events (
    tenant_id text NOT NULL,
    run_id    text NOT NULL,
    seq       integer NOT NULL,
    at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    body      jsonb NOT NULL,
    PRIMARY KEY (tenant_id, run_id, seq),
    FOREIGN KEY (tenant_id, run_id) REFERENCES runtime.runs ON DELETE CASCADE
);

CREATE FUNCTION runtime.refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% is append-only', TG_TABLE_NAME;
END $$;
CREATE TRIGGER events_append_only BEFORE UPDATE ON runtime.events
    FOR EACH ROW EXECUTE FUNCTION runtime.refuse_change();

CREATE TABLE runtime.model_calls (
    tenant_id       text NOT NULL,
    run_id          text NOT NULL,
    turn            integer NOT NULL,
    parent_turn     integer,
    prompt_length   integer NOT NULL,
    prompt_hash     text NOT NULL,
    prompt_delta    integer[] NOT NULL,
    sampled         integer[] NOT NULL,
    logprobs        real[] NOT NULL,
    finish_reason   text NOT NULL,
    temperature     real NOT NULL,
    policy_id       text NOT NULL,
    template_digest text NOT NULL,
    cached_tokens   integer NOT NULL DEFAULT 0,
    trainable       boolean NOT NULL DEFAULT true,
    seconds         real NOT NULL DEFAULT 0,
    PRIMARY KEY (tenant_id, run_id, turn),
    FOREIGN KEY (tenant_id, run_id) REFERENCES runtime.runs ON DELETE CASCADE,
    CHECK (cardinality(logprobs) IN (0, cardinality(sampled)))
);

CREATE TABLE runtime.connector_states (
    tenant_id text NOT NULL,
    run_id    text NOT NULL,
    connector text NOT NULL,
    state     jsonb NOT NULL,
    PRIMARY KEY (tenant_id, run_id, connector),
    FOREIGN KEY (tenant_id, run_id) REFERENCES runtime.runs ON DELETE CASCADE
);
